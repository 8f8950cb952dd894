"""Finds the actors of a running service on the connected Ray cluster."""

import ray
from ray.actor import ActorHandle

from cluster.configuration import ConfigurationError
from services.fleet.fleet import NAME


def fleet_of(namespace: str) -> ActorHandle:
    """Returns the fleet actor of a service.

    Raises:
        ConfigurationError: no service runs under this namespace.
    """
    try:
        return ray.get_actor(NAME, namespace)
    except ValueError as error:
        raise ConfigurationError(f"namespace: no service runs as {namespace!r} on this Ray cluster") from error
