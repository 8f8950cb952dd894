"""Shards that record what they compute, and coordinators of them."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from privmix.budget.actor import NAME
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.coordinator import Coordinator, CoordinatorSettings
from privmix.coordinator.messages import Delta
from privmix.engine.engine import EngineSettings, Request
from privmix.fleet.shard_map import PartGroup, ShardMap
from privmix.privacy.protocol import Protocol
from privmix.shards.shard import Shard
from tests.services.coordinator.actors import NAMESPACE, open_budget

Operation = tuple[Any, ...]


class Operations(TorchDispatchMode):
    """Appends PyTorch's operations to a list: their names, and the shapes and types of their tensors."""

    def __init__(self, recorded: list[Operation]) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._recorded.append((str(func), *((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)))
        return func(*args, **(kwargs or {}))


class RecordingShard(Shard):
    """Records its engine's operations without the names of parts and the tokens."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._operations: list[Operation] = []
        self._losses = 0
        self._salts: set[tuple[str, str | None]] = set()
        self._compute = self._engine.logits
        self._engine.logits = self._recorded  # type: ignore[method-assign]
        for name in ("begin", "partial", "weights"):
            setattr(self._reducer, name, self._recorded_work(getattr(self._reducer, name)))

    def _recorded(self, requests: Sequence[Request]) -> torch.Tensor:
        rows = self._compute(requests)
        requested = tuple((request.sequence, len(request.tokens), len(request.adapters)) for request in requests)
        self._operations.append(("rows", requested, rows.shape, str(rows.dtype), rows.nbytes))
        self._salts |= {(request.sequence, request.cache_salt) for request in requests}
        return rows

    def _recorded_work(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any) -> Any:
            with Operations(self._operations):
                return work(*arguments)

        return recorded

    def lose(self, steps: int) -> None:
        """Loses what it holds next for this many calls, as a restart between two calls does."""
        self._losses = steps

    def _hold(self, *arguments: Any) -> None:
        super()._hold(*arguments)
        if self._losses:
            self._losses -= 1
            self._kept.clear()

    def drop_caches(self, sequences: Sequence[str]) -> None:
        super().drop_caches(sequences)
        self._operations.append(("drop caches", tuple(sequences)))

    def operations(self) -> list[Operation]:
        """Returns the operations since the last call."""
        recorded, self._operations = self._operations, []
        return recorded

    def salts(self) -> set[tuple[str, str | None]]:
        """Returns the cache salts of all sequences since the last call."""
        salts, self._salts = self._salts, set()
        return salts


def shard_map(protocol: Protocol, names: Sequence[str] = ("shard-0", "shard-1")) -> ShardMap:
    models = {index: f"part-{index:03d}" for index in range(protocol.parts)}
    size = protocol.parts // len(names)
    groups = [
        PartGroup(at, {index: models[index] for index in range(at * size, (at + 1) * size)}, (name,))
        for at, name in enumerate(names)
    ]
    return ShardMap(1, protocol, tuple(groups))


@asynccontextmanager
async def coordinating(
    engines: Sequence[EngineSettings], ledger: Path, serving: ShardMap, epsilon: float = 1000.0, **settings: Any
) -> AsyncIterator[Coordinator]:
    terms = PrivacyBudget(ensemble="e", epsilon=epsilon, delta=1e-5, order=4.0, adjacency="part, add or remove")
    keeper = open_budget(ledger, terms)
    chosen = CoordinatorSettings(engines[0].model, NAMESPACE, NAME, **settings)
    coordinator = Coordinator(chosen, serving)
    try:
        yield coordinator
        await coordinator.close()
    finally:
        ray.get(keeper.give_up.remote())


async def until_ended(coordinator: Coordinator, generations: int) -> list[Delta]:
    deltas: list[Delta] = []
    async for batch in coordinator.events("channel"):
        deltas += batch
        if len(reasons(deltas)) == generations:
            return deltas
    raise AssertionError("the channel ended before the generations")


def reasons(deltas: Sequence[Delta]) -> dict[str, str]:
    return {delta.id: delta.finish_reason for delta in deltas if delta.finish_reason is not None}
