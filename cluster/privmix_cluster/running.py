"""Finds the actors of a running service on the connected Ray cluster."""

import ray
from ray.actor import ActorHandle

from privmix.fleet import fleet
from privmix.foundation.errors import ConfigurationError


def fleet_of(namespace: str) -> ActorHandle:
    """Returns the fleet actor of a service.

    Raises:
        ConfigurationError: no service runs under this namespace.
    """
    try:
        return ray.get_actor(fleet.NAME, namespace)
    except ValueError as error:
        raise ConfigurationError(f"namespace: no service runs as {namespace!r} on this Ray cluster") from error
