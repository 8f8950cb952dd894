"""The ensemble as the coordinator sees it: models by number, in part groups spread over shards.

A step has a constant shape. For each private sequence every shard computes one public row and as many part rows as the
protocol can draw from its group: `ZERO` stands for what was not drawn, or is drawn from another group. So neither the
number nor the size nor the order of the engines' operations depends on the draw, and every shard advances every
sequence, whichever parts were drawn.

A protocol that is reproduced as published draws how many parts it uses (`Protocol.rows` is None). Its steps show that
number, and how it is spread over the shards, to an observer of time.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from zlib import crc32

import numpy as np
import torch
from ray.actor import ActorHandle

from services import tracing
from services.coordinator.copies import Copies
from services.coordinator.draws import DrawQueue
from services.coordinator.messages import Unavailable
from services.engine.engine import PUBLIC, ZERO, Request
from services.fleet.shard_map import PartGroup, ShardMap
from services.shard import ShardStatus


@dataclass(frozen=True, slots=True)
class Query:
    """Asks for the next token of a sequence, given its whole context: from the protocol, or from the public model."""

    sequence: str
    tokens: tuple[int, ...]
    private: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """Log-probabilities for each query: one float32 [V] a row, still in the memory that the shards wrote.

    Attributes:
        public: one row a query.
        drawn: one row for each model drawn, grouped by query.
        models: the models drawn for each query, in the order of its rows; none for a query of the public model.
        private: for each query whether the protocol answers it.
        computed: how many rows the shards computed, padding included.
    """

    public: Sequence[np.ndarray]
    drawn: Sequence[np.ndarray]
    models: tuple[tuple[int, ...], ...]
    private: tuple[bool, ...]
    computed: int

    def share(self, queries: slice) -> "Rows":
        """Returns the rows of consecutive queries."""
        firsts = list(accumulate(map(len, self.models), initial=0))
        return replace(
            self,
            public=self.public[queries],
            drawn=self.drawn[firsts[queries.start] : firsts[queries.stop]],
            models=self.models[queries],
            private=self.private[queries],
        )

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies on a device of PyTorch's: of the public rows, [queries, V], and the drawn rows, [rows, V]."""
        drawn = np.stack(self.drawn) if self.drawn else np.empty((0, *self.public[0].shape), np.float32)
        return torch.from_numpy(np.stack(self.public)).to(device), torch.from_numpy(drawn).to(device)


class Ensemble:
    """Draws for every query and collects the rows from all part groups at once.

    Args:
        actor: finds a living shard by its name, or raises ValueError.
        timeout_s: how long a step may take.
        patience_s: how long one of several copies of a shard may take before another one is called, too.
    """

    def __init__(
        self, shard_map: ShardMap, actor: Callable[[str], ActorHandle], timeout_s: float, patience_s: float
    ) -> None:
        rows = shard_map.protocol.rows
        self._groups = [_Group(group, rows, Copies(group.shards, actor, patience_s)) for group in shard_map.groups]
        self._group_of = {model: at for at, group in enumerate(shard_map.groups) for model in group.models}
        self._draws = DrawQueue(shard_map.protocol)
        self._timeout_s = timeout_s

    @property
    def rows_of_a_query(self) -> int:
        """How many rows the groups compute for one query, at most."""
        return sum(group.rows for group in self._groups)

    async def ask(self, queries: Sequence[Query]) -> Rows:
        """Returns the public row of every query and the rows of the models drawn for it, without the padding.

        Raises:
            Unavailable: a group failed or did not answer in time. No model is ever left out of a draw instead: that
                would be another mechanism.
            ValueError: an engine refuses the queries.
        """
        public = [_Asked(query, (), ()) for query in queries if not query.private]
        private = [
            _Asked(query, self._draws.current(query.sequence), self._draws.coming(query.sequence))
            for query in queries
            if query.private
        ]
        # The public row of a sequence comes from the first group. Sequences without a draw need no other.
        asked = [[*private, *public], *([private] * (len(self._groups) - 1))]
        with tracing.span("ask"):
            calls = (group.ask(theirs) for group, theirs in zip(self._groups, asked, strict=True))
            try:
                async with asyncio.timeout(self._timeout_s):
                    answers = await asyncio.gather(*calls)
            except TimeoutError as error:
                raise Unavailable(f"the ensemble did not answer within {self._timeout_s:g} s") from error
        self._draws.advance(one.query.sequence for one in private)
        draws = {one.query.sequence: one.draw for one in private}
        return self._collect(queries, draws, answers)

    def release(self, sequences: Sequence[str]) -> None:
        """Drop the draws and the caches of sequences that have ended."""
        self._draws.forget(sequences)
        for group in self._groups:
            group.copies.release(sequences)

    async def status(self) -> list[list[ShardStatus | Unavailable]]:
        """Returns for each group the status of each copy, or why there is none."""
        return await asyncio.gather(*(group.copies.status() for group in self._groups))

    def _collect(
        self,
        queries: Sequence[Query],
        draws: Mapping[str, tuple[int, ...]],
        answers: Sequence[Mapping[str, np.ndarray]],
    ) -> Rows:
        public: list[np.ndarray] = []
        drawn: list[np.ndarray] = []
        for query in queries:
            public.append(answers[0][query.sequence][0])
            following = [iter(answer.get(query.sequence, _NO_ROWS)[1:]) for answer in answers]
            drawn += (next(following[self._group_of[model]]) for model in draws.get(query.sequence, ()))
        return Rows(
            public,
            drawn,
            tuple(draws.get(query.sequence, ()) for query in queries),
            tuple(query.private for query in queries),
            sum(len(rows) for answer in answers for rows in answer.values()),
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A query with the draw for its token and those for the coming ones."""

    query: Query
    draw: tuple[int, ...]
    coming: Sequence[tuple[int, ...]]


class _Group:
    """One part group: knows its models and how many rows of them a draw can name."""

    def __init__(self, group: PartGroup, rows: int | None, copies: Copies) -> None:
        self.copies = copies
        self.rows = 1 + (len(group.models) if rows is None else min(rows, len(group.models)))
        self._adapters = dict(group.models)
        self._rows = None if rows is None else min(rows, len(group.models))

    async def ask(self, asked: Sequence[_Asked]) -> dict[str, np.ndarray]:
        """Returns for each sequence its rows, [1 + part rows, V]: the public model's, those drawn, then padding."""
        by_copy: dict[tuple[int, ...], list[_Asked]] = defaultdict(list)
        for one in asked:
            by_copy[self.copies.order(crc32(one.query.sequence.encode()))].append(one)
        answers = await asyncio.gather(*(self._call(order, theirs) for order, theirs in by_copy.items()))
        return {sequence: rows for answer in answers for sequence, rows in answer.items()}

    async def _call(self, order: Sequence[int], asked: Sequence[_Asked]) -> dict[str, np.ndarray]:
        requests = [Request(one.query.sequence, one.query.tokens, (PUBLIC, *self._names(one))) for one in asked]
        coming = tuple(name for one in asked for draw in one.coming for name in self._padded(draw))
        answer = await self.copies.next_token(order, requests, coming, tracing.traceparent())
        ends = np.cumsum([len(request.adapters) for request in requests])
        split = np.split(answer, ends[:-1])
        return {request.sequence: rows for request, rows in zip(requests, split, strict=True)}

    def _names(self, asked: _Asked) -> tuple[str, ...]:
        return self._padded(asked.draw) if asked.query.private else ()

    def _padded(self, draw: Sequence[int]) -> tuple[str, ...]:
        """The adapters of this group that the draw names, padded to a constant number."""
        drawn = tuple(self._adapters[model] for model in draw if model in self._adapters)
        return drawn if self._rows is None else drawn + (ZERO,) * (self._rows - len(drawn))


_NO_ROWS = np.empty((0, 0), np.float32)
