"""Does the work of `privmix ensembles`."""

import json
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError
from rich.console import Console
from rich.markup import escape

from cluster.configuration import Configuration
from cluster.launch import check_cohorts
from services.ensembles.records import EnsembleStatus, ServedEnsemble
from services.errors import ConfigurationError, EnsemblesError

KNOWN_S = 60.0
LOOK_S = 0.5


def check_cohort(configuration: Configuration, cohort: str | None, service: ActorHandle) -> None:
    """Checks that an ensemble shares no users with its cohort, whose ensembles the file must name.

    Raises:
        ConfigurationError: it may share users, or the file does not name an ensemble of the cohort that is served.
    """
    check_cohorts(configuration)
    configured = {ensemble.name for ensemble in configuration.served}
    accounts: list[EnsembleStatus] = call(service, "statuses")
    for served in (account.ensemble for account in accounts):
        if cohort is not None and served.cohort == cohort and served.name not in configured:
            raise ConfigurationError(
                f"ensembles.{served.name}: is served in cohort {cohort}, but the file does not name it, so whether it "
                "shares users cannot be checked; add it to the file"
            )


def status_of(service: ActorHandle, name: str) -> EnsembleStatus | None:
    accounts: list[EnsembleStatus] = call(service, "statuses")
    return next((account for account in accounts if name in account.ensemble.names), None)


def wait_for(service: ActorHandle, name: str, state: str, timeout_s: float) -> EnsembleStatus:
    """Waits until the ensemble is in a state or the time is over, and returns its status."""
    deadline = time.monotonic() + timeout_s
    while True:
        account: EnsembleStatus = call(service, "status", name)
        if getattr(account, state) or time.monotonic() >= deadline:
            return account
        time.sleep(LOOK_S)


def call(service: ActorHandle, method: str, *arguments: str | ServedEnsemble) -> Any:
    """Calls a method of the actor that lists the ensembles.

    Raises:
        EnsemblesError: the actor refuses the change.
    """
    try:
        return ray.get(getattr(service, method).remote(*arguments))
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, EnsemblesError) else error from None


def report_status(text: str, account: EnsembleStatus, as_json: bool) -> None:
    if as_json:
        print(json.dumps(account.model_dump(mode="json"), indent=2))
    else:
        Console().print(escape(text))
