"""`privmix ensembles`: the ensembles of a running service; one is added, drained or retired while the others serve."""

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

from cluster.configuration import Configuration, ConfigurationError
from cluster.launch import check_ensemble, keys_database, start_ensemble, stop_ensemble
from cluster.options import AddressOption, JsonOption, NamespaceOption
from cluster.running import ensembles_of
from cluster.steps import Steps
from services.ensembles.records import Ensemble, EnsemblesError, EnsembleStatus
from services.ray_session import joined

KNOWN_S = 60.0
LOOK_S = 0.5

ensembles = typer.Typer(
    name="ensembles", help="List, add, drain or retire the ensembles of a running service.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its model name.")]


@ensembles.command("list")
def list_ensembles(
    address: AddressOption = "auto", namespace: NamespaceOption = "privmix", as_json: JsonOption = False
) -> None:
    """Show the ensembles that the service has now."""
    with joined(address):
        accounts: list[EnsembleStatus] = _ask(ensembles_of(namespace), "statuses")
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
    config: Annotated[Path, typer.Option(help="The YAML file of the deployment, which names it under `ensembles`.")],
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Serve one more ensemble, or one that was drained again; return once every gateway does."""
    configuration = Configuration.load(config)
    chosen = configuration.choose(name)
    steps = Steps()
    with joined(address):
        service = ensembles_of(configuration.namespace)
        there = _there(service, chosen.name)
        if there is not None and there.state == "serving":
            raise ConfigurationError(f"ensembles.{chosen.name}: is served already")
        checked = check_ensemble(chosen, steps, may_begin=chosen.budget.create)
        if there is None:
            start_ensemble(checked, keys_database(configuration), steps)
        try:
            _ask(service, "add", checked.served)
        except EnsemblesError:
            if there is None:
                stop_ensemble(checked.served)
            raise
        steps("Telling the gateways")
        account = _wait(service, chosen.name, "known", KNOWN_S)
        if not account.known:
            raise EnsemblesError(
                f"ensembles.{chosen.name}: a gateway does not serve it after {KNOWN_S:g} s; its log says why. Can "
                f"every node read {checked.model}?"
            )
    _report(f"{chosen.name} is served", account, as_json)


@ensembles.command()
def drain(
    name: Name, address: AddressOption = "auto", namespace: NamespaceOption = "privmix", as_json: JsonOption = False
) -> None:
    """Let an ensemble take no new requests; those that run end as they would. `add` takes this back."""
    with joined(address):
        service = ensembles_of(namespace)
        _ask(service, "drain", name)
        account: EnsembleStatus = _ask(service, "status", name)
    _report(f"{name} takes no new requests, and has {account.live}", account, as_json)


@ensembles.command()
def retire(
    name: Name,
    address: AddressOption = "auto",
    namespace: NamespaceOption = "privmix",
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end of its requests.")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Drain an ensemble, then end its actors and free what they reserve. Its ledger stays."""
    steps = Steps()
    with joined(address):
        service = ensembles_of(namespace)
        _ask(service, "drain", name)
        steps("Waiting for the end of its requests")
        account = _wait(service, name, "drained", timeout)
        if not account.drained:
            raise EnsemblesError(
                f"ensembles.{name}: {account.live} requests are under way after {timeout:g} s; it takes no new ones, "
                "so run this again"
            )
        _ask(service, "remove", account.ensemble.name)
        steps("Stopping: unused budget goes back to the ledger")
        stop_ensemble(account.ensemble)
    _report(f"{name} is retired; remove it from the configuration, or the next start serves it again", account, as_json)


def _there(service: ActorHandle, name: str) -> EnsembleStatus | None:
    accounts: list[EnsembleStatus] = _ask(service, "statuses")
    return next((account for account in accounts if name in account.ensemble.names), None)


def _wait(service: ActorHandle, name: str, state: str, timeout_s: float) -> EnsembleStatus:
    """The ensemble once it is in a state, or when the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        account: EnsembleStatus = _ask(service, "status", name)
        if getattr(account, state) or time.monotonic() >= deadline:
            return account
        time.sleep(LOOK_S)


def _ask(service: ActorHandle, method: str, *arguments: str | Ensemble) -> Any:
    """
    Raises:
        EnsemblesError: it cannot be done.
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
