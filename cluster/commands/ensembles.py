"""Implements `privmix ensembles`, which adds, drains and retires ensembles while a service runs."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.configuration import Configuration
from cluster.launch import check_cohorts, check_ensemble, keys_database, start_ensemble, stop_ensemble
from cluster.options import AddressOption, JsonOption, NamespaceOption
from cluster.running import ensembles_of
from cluster.steps import Steps
from services.ensembles.records import Ensemble, EnsembleStatus
from services.errors import ConfigurationError, EnsemblesError
from services.ray_session import joined

KNOWN_S = 60.0
LOOK_S = 0.5

ensembles = typer.Typer(
    name="ensembles", help="List, add, drain or retire the ensembles of a running service.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The model name of the ensemble.")]


@ensembles.command("list")
def list_ensembles(
    address: AddressOption = "auto", namespace: NamespaceOption = "privmix", as_json: JsonOption = False
) -> None:
    """List the ensembles of the service with their states and running requests."""
    with joined(address):
        accounts: list[EnsembleStatus] = _call(ensembles_of(namespace), "statuses")
    if as_json:
        print(json.dumps([account.model_dump(mode="json") for account in accounts], indent=2))
        return
    table = Table("model", "state", "namespace")
    table.add_column("requests", justify="right")
    for account in accounts:
        state = "drained" if account.drained else account.state
        names = escape(", ".join(account.ensemble.names))
        table.add_row(names, state, escape(account.ensemble.namespace), str(account.live))
    Console().print(table)


@ensembles.command()
def add(
    name: Name,
    config: Annotated[
        Path, typer.Option(help="The YAML file of the deployment, which has the ensemble under `ensembles`.")
    ],
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Serve another ensemble, or a drained one again, and wait until every gateway serves it."""
    configuration = Configuration.load(config)
    chosen = configuration.choose(name)
    steps = Steps()
    with joined(address):
        service = ensembles_of(configuration.namespace)
        present = _status(service, chosen.name)
        if present is not None and present.state == "serving":
            raise ConfigurationError(f"ensembles.{chosen.name}: is served already")
        _check_cohort(configuration, chosen.cohort, service)
        checked = check_ensemble(chosen, steps, may_begin=chosen.budget.create)
        if present is None:
            start_ensemble(checked, keys_database(configuration), steps)
        try:
            _call(service, "add", checked.served)
        except EnsemblesError:
            if present is None:
                stop_ensemble(checked.served)
            raise
        steps("Waiting for the gateways")
        account = _wait(service, chosen.name, "known", KNOWN_S)
        if not account.known:
            raise EnsemblesError(
                f"ensembles.{chosen.name}: a gateway does not serve it after {KNOWN_S:g} s; read the gateway's log, "
                f"and check that every node can read {checked.model}"
            )
    _report(f"{chosen.name} is served", account, as_json)


@ensembles.command()
def drain(
    name: Name, address: AddressOption = "auto", namespace: NamespaceOption = "privmix", as_json: JsonOption = False
) -> None:
    """Refuse new requests to an ensemble and let its running requests finish. `add` serves it again."""
    with joined(address):
        service = ensembles_of(namespace)
        _call(service, "drain", name)
        account: EnsembleStatus = _call(service, "status", name)
    _report(f"{name} accepts no new requests; {account.live} are running", account, as_json)


@ensembles.command()
def retire(
    name: Name,
    address: AddressOption = "auto",
    namespace: NamespaceOption = "privmix",
    timeout: Annotated[
        float, typer.Option(min=0, help="The maximum time in seconds to wait for its running requests.")
    ] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Drain an ensemble, then stop its actors and free their resources. Its ledger is kept."""
    steps = Steps()
    with joined(address):
        service = ensembles_of(namespace)
        _call(service, "drain", name)
        steps("Waiting for its running requests")
        account = _wait(service, name, "drained", timeout)
        if not account.drained:
            raise EnsemblesError(
                f"ensembles.{name}: {account.live} requests still run after {timeout:g} s; it accepts no new requests, "
                "so run this command again"
            )
        _call(service, "remove", account.ensemble.name)
        steps("Stopping; unused budget returns to the ledger")
        stop_ensemble(account.ensemble)
    _report(f"{name} is retired; remove it from the configuration, or the next start serves it again", account, as_json)


def _check_cohort(configuration: Configuration, cohort: str | None, service: ActorHandle) -> None:
    """Checks that an ensemble shares no users with its cohort, whose ensembles the file must name.

    Raises:
        ConfigurationError: it may share users, or the file does not name an ensemble of the cohort that is served.
    """
    check_cohorts(configuration)
    configured = {ensemble.name for ensemble in configuration.served}
    accounts: list[EnsembleStatus] = _call(service, "statuses")
    for served in (account.ensemble for account in accounts):
        if cohort is not None and served.cohort == cohort and served.name not in configured:
            raise ConfigurationError(
                f"ensembles.{served.name}: is served in cohort {cohort}, but the file does not name it, so whether it "
                "shares users cannot be checked; add it to the file"
            )


def _status(service: ActorHandle, name: str) -> EnsembleStatus | None:
    accounts: list[EnsembleStatus] = _call(service, "statuses")
    return next((account for account in accounts if name in account.ensemble.names), None)


def _wait(service: ActorHandle, name: str, state: str, timeout_s: float) -> EnsembleStatus:
    """Waits until the ensemble is in a state or the time is over, and returns its status."""
    deadline = time.monotonic() + timeout_s
    while True:
        account: EnsembleStatus = _call(service, "status", name)
        if getattr(account, state) or time.monotonic() >= deadline:
            return account
        time.sleep(LOOK_S)


def _call(service: ActorHandle, method: str, *arguments: str | Ensemble) -> Any:
    """Calls a method of the actor that lists the ensembles.

    Raises:
        EnsemblesError: the actor refuses the change.
    """
    try:
        return ray.get(getattr(service, method).remote(*arguments))
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, EnsemblesError) else error from None


def _report(text: str, account: EnsembleStatus, as_json: bool) -> None:
    if as_json:
        print(json.dumps(account.model_dump(mode="json"), indent=2))
    else:
        Console().print(escape(text))
