"""Finds the actors of a running service on the connected Ray cluster."""

import ray
from ray.actor import ActorHandle

from privmix.ensembles import actor as ensembles
from privmix.fleet import fleet
from privmix.foundation.errors import ConfigurationError


def fleet_of(namespace: str) -> ActorHandle:
    """Returns the fleet actor of one ensemble, by the namespace of its actors.

    Raises:
        ConfigurationError: no service runs under this namespace.
    """
    return _actor(fleet.NAME, namespace)


def ensembles_of(namespace: str) -> ActorHandle:
    """Returns the actor that lists the ensembles of a service.

    Raises:
        ConfigurationError: no service runs under this namespace.
    """
    return _actor(ensembles.NAME, namespace)


def _actor(name: str, namespace: str) -> ActorHandle:
    try:
        return ray.get_actor(name, namespace)
    except ValueError as error:
        raise ConfigurationError(f"namespace: no service runs as {namespace!r} on this Ray cluster") from error
