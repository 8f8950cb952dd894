"""Finds Ray actors and calls them. A call has the types of the actor's class, which Ray's handles lack."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray.actor import ActorHandle

P = ParamSpec("P")
T = TypeVar("T")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


HEAD: dict[str, float] = {HEAD_NODE_RESOURCE_NAME: 0.001}
"""The resources of what runs on the head node alone: actors with a database's URL or another secret, so that no other
node needs secrets. Ray Serve places its controller in the same way."""


def concurrent(group: str) -> Callable[[Decorated], Decorated]:
    """Runs a method in a concurrency group of its actor. Keeps the method's types, unlike `ray.method`."""
    decorate: Callable[[Decorated], Decorated] = ray.method(concurrency_group=group)
    return decorate


_LOOKUPS = ThreadPoolExecutor(32, "find_actor")
_finding: dict[tuple[str, str], Future[ActorHandle]] = {}


async def find_actor(name: str, namespace: str) -> ActorHandle:
    """Returns the living actor of a name.

    While the head node is away, Ray looks for a minute, in a thread that nothing ends. So one lookup serves all who ask
    for a name meanwhile, and it takes no thread of `asyncio.to_thread`, which other work would wait for.

    Raises:
        ValueError: there is none.
        RuntimeError: this process is not connected to Ray. `ray.get_actor` would start a new local cluster.
    """
    if not ray.is_initialized():
        raise RuntimeError("Ray is not initialised")
    key = namespace, name
    if (found := _finding.get(key)) is None or found.done():
        found = _finding[key] = _LOOKUPS.submit(ray.get_actor, name, namespace)
    return await asyncio.wrap_future(found)  # who no longer waits does not end a thread that looks


@overload
def remote(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate[ActorHandle, P], Awaitable[T]]: ...
@overload
def remote(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[ActorHandle, P], Awaitable[T]]: ...
def remote(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls this method of an actor's class on a handle: `remote(Budget.health)(handle)`."""
    return lambda actor, *arguments, **named: getattr(actor, method.__name__).remote(*arguments, **named)
