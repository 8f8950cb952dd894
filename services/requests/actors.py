"""Finds Ray actors by their names."""

import asyncio

import ray
from ray.actor import ActorHandle


async def find_actor(name: str, namespace: str) -> ActorHandle:
    """Returns the living actor of a name.

    Raises:
        ValueError: there is none.
        RuntimeError: this process is not connected to Ray. `ray.get_actor` would start a new local cluster.
    """
    if not ray.is_initialized():
        raise RuntimeError("Ray is not initialised")
    return await asyncio.to_thread(ray.get_actor, name, namespace)
