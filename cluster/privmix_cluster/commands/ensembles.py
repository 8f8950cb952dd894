"""Implements `privmix ensembles`, which adds, drains and retires ensembles while a service runs."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from privmix.foundation.errors import ConfigurationError, EnsemblesError
from privmix_cluster.options import NAMESPACE, RUNNING, AddressOption, JsonOption, NamespaceOption
from privmix_cluster.steps import Steps

ensembles = typer.Typer(
    name="ensembles", help="List, add, drain or retire the ensembles of a running service.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The model name of the ensemble.")]


@ensembles.command("list")
def list_ensembles(
    address: AddressOption = RUNNING, namespace: NamespaceOption = NAMESPACE, as_json: JsonOption = False
) -> None:
    """List the ensembles of the service with their states and running requests."""
    from privmix.ensembles.actor import Ensembles
    from privmix.foundation.ray_session import joined
    from privmix_cluster.running import ensembles_of
    from privmix_cluster.work.ensembles import call

    with joined(address):
        accounts = call(ensembles_of(namespace), Ensembles.statuses)
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
    address: AddressOption = RUNNING,
    as_json: JsonOption = False,
) -> None:
    """Serve another ensemble, or a drained one again, and wait until every gateway serves it."""
    from privmix.ensembles.actor import Ensembles
    from privmix.foundation.ray_session import joined
    from privmix_cluster.checks import check_ensemble, keys_database
    from privmix_cluster.configuration import Configuration
    from privmix_cluster.ensemble_actors import start_ensemble, stop_ensemble
    from privmix_cluster.running import ensembles_of
    from privmix_cluster.work.ensembles import KNOWN_S, call, check_cohort, report_status, status_of, wait_for

    configuration = Configuration.load(config)
    chosen = configuration.choose(name)
    steps = Steps()
    with joined(address):
        service = ensembles_of(configuration.namespace)
        present = status_of(service, chosen.name)
        if present is not None and present.state == "serving":
            raise ConfigurationError(f"ensembles.{chosen.name}: is served already")
        check_cohort(configuration, chosen.cohort, service)
        checked = check_ensemble(chosen, steps, may_begin=chosen.budget.create)
        if present is None:
            start_ensemble(checked, keys_database(configuration), steps)
        try:
            call(service, Ensembles.add, checked.served)
        except EnsemblesError:
            if present is None:
                stop_ensemble(checked.served)
            raise
        steps("Waiting for the gateways")
        account = wait_for(service, chosen.name, lambda account: account.known, KNOWN_S)
        if not account.known:
            raise EnsemblesError(
                f"ensembles.{chosen.name}: a gateway does not serve it after {KNOWN_S:g} s; read the gateway's log, "
                f"and check that every node can read {checked.model}"
            )
    report_status(f"{chosen.name} is served", account, as_json)


@ensembles.command()
def drain(
    name: Name, address: AddressOption = RUNNING, namespace: NamespaceOption = NAMESPACE, as_json: JsonOption = False
) -> None:
    """Refuse new requests to an ensemble and let its running requests finish. `add` serves it again."""
    from privmix.ensembles.actor import Ensembles
    from privmix.foundation.ray_session import joined
    from privmix_cluster.running import ensembles_of
    from privmix_cluster.work.ensembles import call, report_status

    with joined(address):
        service = ensembles_of(namespace)
        call(service, Ensembles.drain, name)
        account = call(service, Ensembles.status, name)
    report_status(f"{name} accepts no new requests; {account.live} are running", account, as_json)


@ensembles.command()
def retire(
    name: Name,
    address: AddressOption = RUNNING,
    namespace: NamespaceOption = NAMESPACE,
    timeout: Annotated[
        float, typer.Option(min=0, help="The maximum time in seconds to wait for its running requests.")
    ] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Drain an ensemble, then stop its actors and free their resources. Its ledger is kept."""
    from privmix.ensembles.actor import Ensembles
    from privmix.foundation.ray_session import joined
    from privmix_cluster.ensemble_actors import stop_ensemble
    from privmix_cluster.running import ensembles_of
    from privmix_cluster.work.ensembles import call, report_status, wait_for

    steps = Steps()
    with joined(address):
        service = ensembles_of(namespace)
        call(service, Ensembles.drain, name)
        steps("Waiting for its running requests")
        account = wait_for(service, name, lambda account: account.drained, timeout)
        if not account.drained:
            raise EnsemblesError(
                f"ensembles.{name}: {account.live} requests still run after {timeout:g} s; it accepts no new requests, "
                "so run this command again"
            )
        call(service, Ensembles.remove, account.ensemble.name)
        steps("Stopping; unused budget returns to the ledger")
        stop_ensemble(account.ensemble)
    report_status(
        f"{name} is retired; remove it from the configuration, or the next start serves it again", account, as_json
    )
