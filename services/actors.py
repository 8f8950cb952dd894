"""Finds Ray actors and calls them. A call has the types of the actor's class, which Ray's handles lack."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import ray
from ray.actor import ActorHandle

P = ParamSpec("P")
T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


def concurrent(group: str) -> Callable[[Method], Method]:
    """Runs a method in a concurrency group of its actor. Keeps the method's types, unlike `ray.method`."""
    decorate: Callable[[Method], Method] = ray.method(concurrency_group=group)
    return decorate


async def find_actor(name: str, namespace: str) -> ActorHandle:
    """Returns the living actor of a name.

    Raises:
        ValueError: there is none.
        RuntimeError: this process is not connected to Ray. `ray.get_actor` would start a new local cluster.
    """
    if not ray.is_initialized():
        raise RuntimeError("Ray is not initialised")
    return await asyncio.to_thread(ray.get_actor, name, namespace)


@overload
async def call(
    actor: ActorHandle, method: Callable[Concatenate[Any, P], Awaitable[T]], *arguments: P.args, **named: P.kwargs
) -> T: ...
@overload
async def call(
    actor: ActorHandle, method: Callable[Concatenate[Any, P], T], *arguments: P.args, **named: P.kwargs
) -> T: ...
async def call(actor: ActorHandle, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls a method of an actor's class and returns its result."""
    return await getattr(actor, method.__name__).remote(*arguments, **named)
