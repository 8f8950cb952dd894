"""Queries the ensemble: draws the models of each sequence and collects their rows from the shards.

A step has a constant shape. For each private sequence every shard computes one public row and a fixed number of part
rows: the most that the protocol can draw from its group. `ZERO` fills the rows that the draw does not use. Thus the
number, the size and the order of the engines' operations do not depend on the draw, and every shard reads every token.
Only rows that are used leave a shard: the drawn ones, and the public rows of the first group.

A mechanism reproduced as published may draw the number of parts (`Protocol.rows` is None). An observer of its timing
can learn that number, and its distribution over the shards.
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
    """Requests the next token of a sequence from the protocol (`private`) or from the public model alone.

    Attributes:
        sequence: the sequence's id.
        tokens: the whole context, prompt and output.
        cache_salt: see `services.engine.engine.Request`.
    """

    sequence: str
    tokens: tuple[int, ...]
    private: bool
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Holds the log-probabilities of each query. A row is float32 [V] and shares memory with Ray's object store.

    Attributes:
        public: one row for each query.
        drawn: one row for each drawn model, grouped by query.
        models: the models drawn for each query, in the order of its rows; empty where the public model answers.
        private: whether the protocol answers the query.
        computed: the number of rows that the shards computed, padding included.
        received: the number of bytes of the rows that the shards returned.
    """

    public: Sequence[np.ndarray]
    drawn: Sequence[np.ndarray]
    models: tuple[tuple[int, ...], ...]
    private: tuple[bool, ...]
    computed: int
    received: int

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
        """Copies the public rows, [queries, V], and the drawn rows, [rows, V], to a PyTorch device."""
        drawn = np.stack(self.drawn) if self.drawn else np.empty((0, *self.public[0].shape), np.float32)
        return torch.from_numpy(np.stack(self.public)).to(device), torch.from_numpy(drawn).to(device)


class Ensemble:
    """Draws models for every query and collects the rows from all part groups in parallel.

    Args:
        actor: returns the living shard with a name, or raises ValueError.
        timeout_s: the timeout of a step.
        patience_s: how long a copy of a shard may take before the next copy is called too.
    """

    def __init__(
        self, shard_map: ShardMap, actor: Callable[[str], ActorHandle], timeout_s: float, patience_s: float
    ) -> None:
        rows = shard_map.protocol.rows
        self._groups = [
            _Group(group, rows, Copies(group.shards, actor, patience_s), public=index == 0)
            for index, group in enumerate(shard_map.groups)
        ]
        self._group_of = {model: index for index, group in enumerate(shard_map.groups) for model in group.models}
        self._draws = DrawQueue(shard_map.protocol)
        self._timeout_s = timeout_s

    @property
    def rows_of_a_query(self) -> int:
        """The maximum number of rows that the groups compute for one query."""
        return sum(group.rows for group in self._groups)

    async def ask(self, queries: Sequence[Query]) -> Rows:
        """Returns the public row of every query and the rows of the models drawn for it, without the padding.

        Raises:
            Unavailable: a group failed or did not answer in time. The step fails as a whole, because leaving a drawn
                model out would be another mechanism.
            ValueError: an engine refuses the queries.
        """
        public = [_DrawnQuery(query, (), ()) for query in queries if not query.private]
        private = [
            _DrawnQuery(query, self._draws.current(query.sequence), self._draws.coming(query.sequence))
            for query in queries
            if query.private
        ]
        # The first group computes the public rows, so the other groups get no public queries.
        by_group = [[*private, *public], *([private] * (len(self._groups) - 1))]
        with tracing.span("ask"):
            calls = (group.ask(drawn) for group, drawn in zip(self._groups, by_group, strict=True))
            try:
                async with asyncio.timeout(self._timeout_s):
                    answers = await asyncio.gather(*calls)
            except TimeoutError as error:
                raise Unavailable(f"the ensemble did not answer within {self._timeout_s:g} s") from error
        self._draws.advance(drawn.query.sequence for drawn in private)
        draws = {drawn.query.sequence: drawn.draw for drawn in private}
        return self._collect(queries, draws, answers)

    def release(self, sequences: Sequence[str]) -> None:
        """Drops the draws and the caches of sequences that have ended."""
        self._draws.forget(sequences)
        for group in self._groups:
            group.copies.release(sequences)

    async def status(self) -> list[list[ShardStatus | Unavailable]]:
        """Returns, for each group, the status of each copy or the error that explains its absence."""
        return await asyncio.gather(*(group.copies.status() for group in self._groups))

    def _collect(
        self,
        queries: Sequence[Query],
        draws: Mapping[str, tuple[int, ...]],
        answers: "Sequence[_Answer]",
    ) -> Rows:
        public: list[np.ndarray] = []
        drawn: list[np.ndarray] = []
        for query in queries:
            own = [iter(answer.rows.get(query.sequence, _NO_ROWS)) for answer in answers]
            public.append(next(own[0]))
            drawn += (next(own[self._group_of[model]]) for model in draws.get(query.sequence, ()))
        return Rows(
            public,
            drawn,
            tuple(draws.get(query.sequence, ()) for query in queries),
            tuple(query.private for query in queries),
            sum(answer.computed for answer in answers),
            sum(rows.nbytes for answer in answers for rows in answer.rows.values()),
        )


@dataclass(frozen=True, slots=True)
class _DrawnQuery:
    """Joins a query with the models drawn for its token and for the tokens after it."""

    query: Query
    draw: tuple[int, ...]
    coming: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Answer:
    """Holds the rows that a group returned for each sequence, [rows, V], and the number that it computed."""

    rows: Mapping[str, np.ndarray]
    computed: int


class _Group:
    """Queries one part group with a constant number of part rows.

    Args:
        public: return the public rows, which every group computes.
    """

    def __init__(self, group: PartGroup, rows: int | None, copies: Copies, *, public: bool) -> None:
        self.copies = copies
        self._public = public
        self.rows = 1 + (len(group.models) if rows is None else min(rows, len(group.models)))
        self._adapters = dict(group.models)
        self._rows = None if rows is None else min(rows, len(group.models))

    async def ask(self, queries: Sequence[_DrawnQuery]) -> _Answer:
        """Returns the rows of each sequence: the public row if this group returns it, and then the drawn rows."""
        by_copy: dict[tuple[int, ...], list[_DrawnQuery]] = defaultdict(list)
        for drawn in queries:
            by_copy[self.copies.order(crc32(drawn.query.sequence.encode()))].append(drawn)
        answers = await asyncio.gather(*(self._call(order, batch) for order, batch in by_copy.items()))
        rows = {sequence: own for answer in answers for sequence, own in answer.rows.items()}
        return _Answer(rows, sum(answer.computed for answer in answers))

    async def _call(self, order: Sequence[int], queries: Sequence[_DrawnQuery]) -> _Answer:
        requests = [
            Request(drawn.query.sequence, drawn.query.tokens, (PUBLIC, *self._names(drawn)), drawn.query.cache_salt)
            for drawn in queries
        ]
        coming = tuple(name for drawn in queries for draw in drawn.coming for name in self._padded(draw))
        unused = {ZERO} if self._public else {ZERO, PUBLIC}
        used = [[name not in unused for name in request.adapters] for request in requests]
        returned = np.flatnonzero(np.concatenate(used)).tolist()
        answer = await self.copies.next_token(order, requests, coming, tracing.traceparent(), returned)
        split = np.split(answer, np.cumsum([sum(own) for own in used])[:-1])
        return _Answer(
            {request.sequence: rows for request, rows in zip(requests, split, strict=True)},
            sum(len(request.adapters) for request in requests),
        )

    def _names(self, drawn: _DrawnQuery) -> tuple[str, ...]:
        return self._padded(drawn.draw) if drawn.query.private else ()

    def _padded(self, draw: Sequence[int]) -> tuple[str, ...]:
        """Returns the group's adapters in a draw, padded to a constant number."""
        drawn = tuple(self._adapters[model] for model in draw if model in self._adapters)
        return drawn if self._rows is None else drawn + (ZERO,) * (self._rows - len(drawn))


_NO_ROWS = np.empty((0, 0), np.float32)
