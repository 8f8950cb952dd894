"""Does the work of `privmix ensembles`."""

import json
import time
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError
from rich.console import Console
from rich.markup import escape

from privmix.cluster.checks import check_cohorts
from privmix.cluster.configuration import Configuration
from privmix.services.ensembles.actor import Ensembles
from privmix.services.ensembles.records import EnsembleStatus
from privmix.services.foundation.actors import remote
from privmix.services.foundation.errors import ConfigurationError, EnsemblesError

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
    configured = {ensemble.name for ensemble in configuration.served}
    for served in (account.ensemble for account in call(service, Ensembles.statuses)):
        if cohort is not None and served.cohort == cohort and served.name not in configured:
            raise ConfigurationError(
                f"ensembles.{served.name}: is served in cohort {cohort}, but the file does not name it, so whether it "
                "shares users cannot be checked; add it to the file"
            )


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
