"""Finds, calls and stops actors by their names, and stops those of a start that fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util import list_named_actors

from privmix.fleet import fleet
from privmix.foundation.actors import remote
from privmix.foundation.errors import ConfigurationError, LedgerError

CLOSING_S = 10.0
"""How long an actor that is asked to close may take to answer."""


def fleet_of(namespace: str) -> ActorHandle:
    """Returns the fleet actor of a service.

    Raises:
        ConfigurationError: no service runs under this namespace.
    """
    try:
        return ray.get_actor(fleet.NAME, namespace)
    except ValueError as error:
        raise ConfigurationError(f"namespace: nothing runs as {namespace!r}; correct --namespace") from error


def call(name: str, namespace: str, method: Callable[[Any], object]) -> None:
    """Calls a method of an actor's class. Does nothing if the actor is gone or does not respond."""
    with suppress(RayError, LedgerError, TimeoutError, ValueError):
        ray.get(remote(method)(ray.get_actor(name, namespace)), timeout=CLOSING_S)


def kill(name: str, namespace: str) -> None:
    with suppress(ValueError):  # the actor is gone already
        ray.kill(ray.get_actor(name, namespace))


@contextmanager
def all_or_none(namespace: str) -> Iterator[None]:
    """Stops all actors that the block started if the block fails. Actors that ran before are kept."""
    before = _running(namespace)
    try:
        yield
    except BaseException:
        for actor in _running(namespace) - before:
            if actor[0] == fleet.NAME:  # first, because while it starts it makes shards
                kill(*actor)
        for actor in _running(namespace) - before:
            kill(*actor)
        raise


def _running(namespace: str) -> set[tuple[str, str]]:
    """Returns the names and namespaces of the actors of a service."""
    actors = list_named_actors(all_namespaces=True)
    return {(actor["name"], namespace) for actor in actors if actor["namespace"] == namespace}
