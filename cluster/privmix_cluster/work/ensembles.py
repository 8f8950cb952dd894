"""Does the work of `privmix ensembles`."""

import json
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError
from rich.console import Console
from rich.markup import escape

from privmix.ensembles.actor import Ensembles
from privmix.ensembles.records import EnsembleStatus, ServedEnsemble
from privmix.foundation.actors import remote
from privmix.foundation.errors import ConfigurationError, EnsemblesError
from privmix.training.manifest import Manifest
from privmix_cluster.checks import check_cohorts
from privmix_cluster.configuration import Configuration

KNOWN_S = 60.0
LOOK_S = 0.5

P = ParamSpec("P")
T = TypeVar("T")


def check_cohort(configuration: Configuration, cohort: str | None, service: ActorHandle) -> None:
    """Checks that an ensemble shares no users with its cohort, whose ensembles the file must name.

    Raises:
        ConfigurationError: it may share users, or the file does not name an ensemble of the cohort that is served.
    """
    check_cohorts(configuration)
    if cohort is not None:
        check_members(configuration, cohort, _served(service))


def check_deployed_cohorts(configuration: Configuration, service: ActorHandle) -> None:
    """Checks that no ensemble that a deployment starts shares users with one of its cohort that is served or drains.

    Those of the file must have been checked (`check_cohorts`).

    Raises:
        ConfigurationError: it may share users.
    """
    cohorts = {ensemble.name: ensemble.cohort for ensemble in configuration.served}
    # One whose cohort the file changes is no member any more once the file is deployed.
    staying = [served for served in _served(service) if cohorts.get(served.name, served.cohort) == served.cohort]
    for cohort in {cohort for cohort in cohorts.values() if cohort is not None}:
        check_members(configuration, cohort, staying)


def check_members(configuration: Configuration, cohort: str, served: Iterable[ServedEnsemble]) -> None:
    """Checks that the file has each served ensemble of a cohort as it is served, if another one joins the cohort.

    Args:
        served: the ensembles that the service runs, also those that drain: their answers still count.

    Raises:
        ConfigurationError: it has not, so whether they share users cannot be checked.
    """
    files = {each.name: Manifest.load(each.ensemble).ensemble for each in configuration.served if each.cohort == cohort}
    members = {each.name: each.ensemble for each in served if each.cohort == cohort}
    if all(members.get(name) == ensemble for name, ensemble in files.items()):
        return  # nothing joins
    for name, ensemble in members.items():
        if name not in files or files[name] != ensemble:
            raise ConfigurationError(
                f"ensembles.{name}: is served in cohort {cohort}, and the file does not name it there, or names "
                "another ensemble, so whether it shares users cannot be checked; add it to the file as it is served, "
                f"or retire it (privmix ensembles retire {name})"
            )


def _served(service: ActorHandle) -> list[ServedEnsemble]:
    return [account.ensemble for account in call(service, Ensembles.statuses)]


def status_of(service: ActorHandle, name: str) -> EnsembleStatus | None:
    return next((account for account in call(service, Ensembles.statuses) if name in account.ensemble.names), None)


def wait_for(
    service: ActorHandle, name: str, is_reached: Callable[[EnsembleStatus], bool], timeout_s: float
) -> EnsembleStatus:
    """Waits until the ensemble is in a state or the time is over, and returns its status."""
    deadline = time.monotonic() + timeout_s
    while True:
        account = call(service, Ensembles.status, name)
        if is_reached(account) or time.monotonic() >= deadline:
            return account
        time.sleep(LOOK_S)


def call(
    service: ActorHandle,
    method: Callable[Concatenate[Ensembles, P], Awaitable[T]],
    *arguments: P.args,
    **named: P.kwargs,
) -> T:
    """Calls a method of the actor that lists the ensembles.

    Raises:
        EnsemblesError: the actor refuses the change.
    """
    try:
        result: T = ray.get(remote(method)(service, *arguments, **named))
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, EnsemblesError) else error from None
    return result


def report_status(text: str, account: EnsembleStatus, as_json: bool) -> None:
    if as_json:
        print(json.dumps(account.model_dump(mode="json"), indent=2))
    else:
        Console().print(escape(text))
