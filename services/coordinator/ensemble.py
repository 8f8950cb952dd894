"""Queries the ensemble: draws the models of each sequence and collects what the shards compute for them.

A step has a constant shape. For each private sequence every shard computes one public row and a fixed number of part
rows: the most that the protocol can draw from its group. `ZERO` fills the rows that the draw does not use. Thus the
number, the size and the order of the engines' operations do not depend on the draw, and every shard reads every token.

With an additive protocol (`Protocol.additive`) the shards reduce their rows (`services.reduction`), and what leaves
them has a constant shape, too. A group that is alone holds the sampling weights of each query and sends their totals;
in a second call it makes tokens of points below them (`ShardedEnsemble.weigh`, `ShardedEnsemble.sample`). Of several
groups there come from the first group p0, and from each group one partial for each private sequence,
whatever is drawn. The first group does this in one call. The others keep their rows and reduce them in a second call,
with the p0 of the first. With other protocols the rows that are used leave a shard: the drawn ones, and the public rows
of the first group.

A mechanism reproduced as published may draw the number of parts (`Protocol.rows` is None). An observer of its timing
can learn that number, and its distribution over the shards.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, count
from typing import Any
from zlib import crc32

import numpy as np
import ray
from ray.actor import ActorHandle

from services import tracing
from services.coordinator.copies import ShardCopies
from services.coordinator.draws import DrawQueue
from services.engine.engine import PUBLIC, ZERO, Request
from services.errors import CoordinatorUnavailable
from services.fleet.shard_map import PartGroup, ShardMap
from services.lazily import torch
from services.privacy.mollifiers.shaping import SamplingOptions
from services.privacy.protocol import Protocol
from services.privacy.sampling.categorical import draw
from services.reduction import NO_POINT, Reduced, Reduction, Weighed
from services.shard import ShardStatus, StepKey


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
    """Holds the logits of each query. A row is float32 [V] and shares memory with Ray's object store.

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

    def chunk(self, queries: slice) -> Rows:
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


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Holds what the shards made of the rows of each query. Arrays share memory with Ray's object store.

    Attributes:
        public: p0 of each query, float32 [V].
        sums: the partials of each private query, one [V] of each group (`services.privacy.protocol.Partial`).
        charges: for each private query, what it charges to each part, int64 [parts]; empty without accounts.
        private: whether the protocol answers the query.
        computed: the number of rows that the shards computed, padding included.
        received: the number of bytes that the shards returned.
    """

    public: Sequence[np.ndarray]
    sums: Sequence[Sequence[np.ndarray]]
    charges: Sequence[np.ndarray]
    private: tuple[bool, ...]
    computed: int
    received: int

    def chunk(self, queries: slice) -> PartialSums:
        """Returns the partials of consecutive queries."""
        before = sum(self.private[: queries.start])
        own = slice(before, before + sum(self.private[queries]))
        return replace(
            self,
            public=self.public[queries],
            sums=self.sums[own],
            charges=self.charges[own],
            private=self.private[queries],
        )


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Describes the sampling weights of each query, which the shards of the only group hold until `sample`.

    Attributes:
        sequences: the sequence of each query.
        totals: the sum of the weights of each query. A point below it (`categorical.draw`) is a token.
        charges: for each private query, what it charges to each part; empty without accounts.
        private: whether the protocol answers the query.
        computed: the number of rows that the shards computed, padding included.
        received: the number of bytes that the shards returned.
        held: the batches of the step, by the shard that holds their weights.
    """

    sequences: Sequence[str]
    totals: Sequence[int]
    charges: Sequence[tuple[int, ...]]
    private: tuple[bool, ...]
    computed: int
    received: int
    held: Sequence[_HeldBatch]

    @property
    def losses(self) -> None:
        """No additive protocol has losses that depend on the rows."""


class ShardedEnsemble:
    """Draws models for every query and collects the answers of all part groups in parallel.

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
            _Group(group, rows, ShardCopies(group.shards, actor, patience_s), public=index == 0)
            for index, group in enumerate(shard_map.groups)
        ]
        self._group_of = {model: index for index, group in enumerate(shard_map.groups) for model in group.models}
        self._protocol = shard_map.protocol
        self._draws = DrawQueue(shard_map.protocol)
        self._timeout_s = timeout_s

    @property
    def rows_of_a_query(self) -> int:
        """The maximum number of rows that the groups compute for one query."""
        return sum(group.rows for group in self._groups)

    async def ask(self, queries: Sequence[Query]) -> Rows:
        """Returns the public row of every query and the rows of the models drawn for it, without the padding.

        Raises:
            CoordinatorUnavailable: a group failed or did not answer in time. The step fails as a whole, because leaving
                a drawn model out would be another mechanism.
            ValueError: an engine refuses the queries.
        """
        by_group = self._by_group(queries)
        async with self._asking():
            calls = (group.ask(drawn) for group, drawn in zip(self._groups, by_group, strict=True))
            answers = await asyncio.gather(*calls)
        draws = {drawn.query.sequence: drawn.draw for drawn in by_group[0] if drawn.query.private}
        self._draws.advance(draws)
        return self._collect(queries, draws, answers)

    async def reduce(
        self, queries: Sequence[Query], options: Sequence[SamplingOptions], allowances: Sequence[Sequence[int]] = ()
    ) -> PartialSums:
        """Returns p0 of every query and the partials of all groups, for an additive protocol; see `ask` for the errors.

        Args:
            options: of each query.
            allowances: what the token of each private query may charge to each part, for an event with accounts.
        """
        private = [query.sequence for query in queries if query.private]
        terms, step = self._terms(queries, options, allowances), next(_steps)
        (first, own), *others = zip(self._groups, self._by_group(queries), strict=True)
        async with self._asking():
            public = asyncio.ensure_future(first.reduce(own, terms))
            calls = (group.reduce_kept(drawn, terms, step, public) for group, drawn in others)
            answers = await asyncio.gather(public, *calls)
        self._draws.advance(private)
        by_sequence = [answer.rows for answer in answers]
        return PartialSums(
            [by_sequence[0][query.sequence].public for query in queries],
            [[reduced[sequence].sums for reduced in by_sequence] for sequence in private],
            [self._of_all_parts([reduced[sequence].charges for reduced in by_sequence]) for sequence in private]
            if allowances
            else [],
            tuple(query.private for query in queries),
            sum(answer.computed for answer in answers),
            sum(answer.received for answer in answers),
        )

    @property
    def samples(self) -> bool:
        """Whether a shard has all rows of a draw, so that it can hold the weights and sample beside them (`weigh`)."""
        return self._protocol.additive and len(self._groups) == 1

    async def weigh(
        self, queries: Sequence[Query], options: Sequence[SamplingOptions], allowances: Sequence[Sequence[int]] = ()
    ) -> HeldWeights:
        """Lets the shards of the only group compute the sampling weights of every query; see `reduce`.

        What comes back has the same size whatever is drawn: a total, and charges, for each query.
        """
        terms = self._terms(queries, options, allowances)
        ((group, own),) = zip(self._groups, self._by_group(queries), strict=True)
        async with self._asking():
            held = await group.weigh(own, terms, next(_steps))
        self._draws.advance([query.sequence for query in queries if query.private])
        place = {drawn.query.sequence: (batch, row) for batch in held for row, drawn in enumerate(batch.batch.queries)}
        return HeldWeights(
            [query.sequence for query in queries],
            [int(batch.weighed.totals[row]) for batch, row in (place[query.sequence] for query in queries)],
            [
                tuple(self._of_all_parts([batch.weighed.charges[row]]).tolist())
                for batch, row in (place[query.sequence] for query in queries if query.private)
                if batch.weighed.charges is not None
            ],
            tuple(query.private for query in queries),
            sum(_computed(batch.batch) for batch in held),
            sum(batch.weighed.nbytes for batch in held),
            held,
        )

    async def sample(self, held: HeldWeights, paid: Collection[int], free: Collection[int]) -> dict[int, int]:
        """Samples the tokens of some queries of `weigh`, and no others; returns them by the query's index.

        Call it once for a step, for tokens that are paid for: their points are drawn here, at once, and make the tokens
        whether the shards answer or not.

        Args:
            paid: private queries, whose tokens come from the protocol's weights.
            free: public queries, whose tokens come from p0.

        Raises:
            CoordinatorUnavailable: a shard failed, did not answer in time, or has lost the weights.
            ValueError: a private query is among the free ones.
        """
        if any(held.private[at] for at in free) or not all(held.private[at] for at in paid):
            raise ValueError("paid must name private queries, and free must name public ones")
        (group,) = self._groups
        places = sorted({*paid, *free})
        drawn = dict(zip(places, draw(held.totals[at] for at in places), strict=True))
        points = {held.sequences[at]: point for at, point in drawn.items()}
        async with self._asking():
            picked = await asyncio.gather(*(group.pick(batch, points) for batch in held.held))
        tokens = {sequence: token for own in picked for sequence, token in own.items()}
        return {at: tokens[held.sequences[at]] for at in places}

    def drop_caches(self, sequences: Sequence[str]) -> None:
        """Drops the draws and the caches of sequences that have ended."""
        self._draws.forget(sequences)
        for group in self._groups:
            group.copies.drop_caches(sequences)

    async def status(self) -> list[list[ShardStatus | CoordinatorUnavailable]]:
        """Returns, for each group, the status of each copy or the error that explains its absence."""
        return await asyncio.gather(*(group.copies.status() for group in self._groups))

    def _by_group(self, queries: Sequence[Query]) -> list[list[_DrawnQuery]]:
        """Returns the queries of each group, private ones first. Only the first group gets public queries."""
        public = [_DrawnQuery(query, (), ()) for query in queries if not query.private]
        private = [
            _DrawnQuery(query, self._draws.current(query.sequence), self._draws.coming(query.sequence))
            for query in queries
            if query.private
        ]
        return [[*private, *public], *([private] * (len(self._groups) - 1))]

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        with tracing.span("ask"):
            try:
                async with asyncio.timeout(self._timeout_s):
                    yield
            except TimeoutError as error:
                raise CoordinatorUnavailable(f"the ensemble did not answer within {self._timeout_s:g} s") from error

    def _terms(
        self, queries: Sequence[Query], options: Sequence[SamplingOptions], allowances: Sequence[Sequence[int]]
    ) -> _Terms:
        private = [query.sequence for query in queries if query.private]
        return _Terms(
            self._protocol,
            {query.sequence: own for query, own in zip(queries, options, strict=True)},
            dict(zip(private, allowances, strict=True)) if allowances else {},
        )

    def _of_all_parts(self, by_group: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the charges of a query to each part, from those of each group's parts in ascending order."""
        charges = np.zeros(self._protocol.parts, dtype=np.int64)
        for group, own in zip(self._groups, by_group, strict=True):
            charges[sorted(group.models)] = own
        return charges

    def _collect(
        self,
        queries: Sequence[Query],
        draws: Mapping[str, tuple[int, ...]],
        answers: Sequence[_Answer],
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
class _Terms:
    """Holds what the coordinator fixes before a step: the options of each sequence, and its allowances by part."""

    protocol: Protocol
    options: Mapping[str, SamplingOptions]
    allowances: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Answer:
    """Holds the rows that a group returned for each sequence, [rows, V], and the number that it computed."""

    rows: Mapping[str, np.ndarray]
    computed: int


@dataclass(frozen=True, slots=True)
class _Reduced:
    """Holds what a group returned for one sequence: p0 and its partial, [V], and charges, [n]; None if absent."""

    public: Any
    sums: Any
    charges: Any


@dataclass(frozen=True, slots=True)
class _ReducedAnswer:
    """Holds what a group returned for each sequence, the number of its rows, and the bytes that left its shards."""

    rows: Mapping[str, _Reduced]
    computed: int
    received: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Holds the queries of a group that prefer the same copies, and what the shard is told about them."""

    queries: Sequence[_DrawnQuery]
    order: Sequence[int]
    requests: Sequence[Request]
    coming: Sequence[str]


@dataclass(frozen=True, slots=True)
class _HeldBatch:
    """Holds a batch whose weights one copy holds, under a key, and what it returned."""

    batch: _Batch
    copy: int
    key: StepKey
    weighed: Weighed


class _Group:
    """Queries one part group with a constant number of part rows.

    Args:
        public: return the public rows, which every group computes.
    """

    def __init__(self, group: PartGroup, rows: int | None, copies: ShardCopies, *, public: bool) -> None:
        self.copies = copies
        self.models = group.models
        self._public = public
        self.rows = 1 + (len(group.models) if rows is None else min(rows, len(group.models)))
        self._rows = None if rows is None else min(rows, len(group.models))

    async def ask(self, queries: Sequence[_DrawnQuery]) -> _Answer:
        """Returns the rows of each sequence: the public row if this group returns it, and then the drawn rows."""
        answers = await asyncio.gather(*map(self._ask, self._batches(queries)))
        rows = {sequence: own for answer in answers for sequence, own in answer.rows.items()}
        return _Answer(rows, sum(answer.computed for answer in answers))

    async def reduce(self, queries: Sequence[_DrawnQuery], terms: _Terms) -> _ReducedAnswer:
        """Returns p0 of each sequence, and the partial of each private one."""
        return _joined(await asyncio.gather(*(self._reduce(batch, terms) for batch in self._batches(queries))))

    async def reduce_kept(
        self, queries: Sequence[_DrawnQuery], terms: _Terms, step: int, public: Awaitable[_ReducedAnswer]
    ) -> _ReducedAnswer:
        """Returns the partial of each sequence, with p0 from another group, which computes it at the same time."""
        batches = enumerate(self._batches(queries))
        calls = (self._reduce_kept(batch, terms, StepKey(_caller(), step, at), public) for at, batch in batches)
        return _joined(await asyncio.gather(*calls))

    async def weigh(self, queries: Sequence[_DrawnQuery], terms: _Terms, step: int) -> list[_HeldBatch]:
        """Lets copies compute the weights of each sequence, and hold them."""
        batches = enumerate(self._batches(queries))
        return await asyncio.gather(*(self._weigh(batch, terms, StepKey(_caller(), step, at)) for at, batch in batches))

    async def pick(self, held: _HeldBatch, points: Mapping[str, int]) -> dict[str, int]:
        """Returns the tokens of those sequences of a batch that have a point."""
        sequences = [drawn.query.sequence for drawn in held.batch.queries]
        own = np.array([points.get(sequence, NO_POINT) for sequence in sequences], dtype=np.int64)
        trace = tracing.traceparent()
        tokens = await self.copies.same(held.copy, lambda shard: shard.pick.remote(held.key, own, trace))
        return dict(zip(sequences, tokens.tolist(), strict=True))

    def _batches(self, queries: Sequence[_DrawnQuery]) -> list[_Batch]:
        by_copy: dict[tuple[int, ...], list[_DrawnQuery]] = defaultdict(list)
        for drawn in queries:
            by_copy[self.copies.order(crc32(drawn.query.sequence.encode()))].append(drawn)
        return [
            _Batch(
                own,
                order,
                [
                    Request(each.query.sequence, each.query.tokens, (PUBLIC, *self._names(each)), each.query.cache_salt)
                    for each in own
                ],
                tuple(name for each in own for draw in each.coming for name in self._padded(draw)),
            )
            for order, own in by_copy.items()
        ]

    async def _ask(self, batch: _Batch) -> _Answer:
        unused = {ZERO} if self._public else {ZERO, PUBLIC}
        used = [[name not in unused for name in request.adapters] for request in batch.requests]
        returned = np.flatnonzero(np.concatenate(used)).tolist()
        trace = tracing.traceparent()
        _, answer = await self.copies.first(
            batch.order, lambda shard: shard.next_token.remote(batch.requests, batch.coming, trace, returned)
        )
        split = np.split(answer, np.cumsum([sum(own) for own in used])[:-1])
        return _Answer(
            {request.sequence: rows for request, rows in zip(batch.requests, split, strict=True)}, _computed(batch)
        )

    async def _reduce(self, batch: _Batch, terms: _Terms) -> _ReducedAnswer:
        reduction, trace = self._reduction(batch, terms), tracing.traceparent()
        _, reduced = await self.copies.first(
            batch.order, lambda shard: shard.reduce.remote(batch.requests, reduction, batch.coming, trace)
        )
        return _by_sequence(batch, reduced)

    async def _reduce_kept(
        self, batch: _Batch, terms: _Terms, key: StepKey, public: Awaitable[_ReducedAnswer]
    ) -> _ReducedAnswer:
        trace = tracing.traceparent()
        copy, _ = await self.copies.first(
            batch.order, lambda shard: shard.keep.remote(key, batch.requests, batch.coming, trace)
        )
        p0 = (await public).rows
        stacked = np.stack([p0[drawn.query.sequence].public for drawn in batch.queries])
        reduction = self._reduction(batch, terms)
        reduced = await self.copies.same(copy, lambda shard: shard.reduce_kept.remote(key, reduction, stacked, trace))
        return _by_sequence(batch, reduced)

    async def _weigh(self, batch: _Batch, terms: _Terms, key: StepKey) -> _HeldBatch:
        reduction, trace = self._reduction(batch, terms), tracing.traceparent()
        copy, weighed = await self.copies.first(
            batch.order, lambda shard: shard.weigh.remote(key, batch.requests, reduction, batch.coming, trace)
        )
        return _HeldBatch(batch, copy, key, weighed)

    def _reduction(self, batch: _Batch, terms: _Terms) -> Reduction:
        private = [drawn for drawn in batch.queries if drawn.query.private]
        width = self.rows - 1
        drawn = np.zeros((len(private), width), dtype=np.bool_)
        allowances = np.zeros(drawn.shape, dtype=np.int64) if terms.allowances else None
        for row, each in enumerate(private):
            own = self._drawn(each.draw)
            drawn[row, : len(own)] = True
            if allowances is not None:
                granted = terms.allowances[each.query.sequence]
                allowances[row, : len(own)] = [granted[model] for model in own]
        options = tuple(terms.options[each.query.sequence] for each in batch.queries)
        return Reduction(terms.protocol, options, drawn, allowances)

    def _names(self, drawn: _DrawnQuery) -> tuple[str, ...]:
        return self._padded(drawn.draw) if drawn.query.private else ()

    def _drawn(self, draw: Sequence[int]) -> list[int]:
        """Returns the models of a draw that are in this group."""
        return [model for model in draw if model in self.models]

    def _padded(self, draw: Sequence[int]) -> tuple[str, ...]:
        """Returns the group's adapters in a draw, padded to a constant number."""
        drawn = tuple(self.models[model] for model in self._drawn(draw))
        return drawn if self._rows is None else drawn + (ZERO,) * (self._rows - len(drawn))


def _computed(batch: _Batch) -> int:
    return sum(len(request.adapters) for request in batch.requests)


def _by_sequence(batch: _Batch, reduced: Reduced) -> _ReducedAnswer:
    """Divides what a shard returned for a batch, private sequences first, among the sequences."""
    rows = {
        drawn.query.sequence: _Reduced(
            None if reduced.public is None else reduced.public[row],
            None if reduced.sums is None or not drawn.query.private else reduced.sums[row],
            None if reduced.charges is None or not drawn.query.private else reduced.charges[row],
        )
        for row, drawn in enumerate(batch.queries)
    }
    return _ReducedAnswer(rows, _computed(batch), reduced.nbytes)


def _joined(answers: Sequence[_ReducedAnswer]) -> _ReducedAnswer:
    rows = {sequence: own for answer in answers for sequence, own in answer.rows.items()}
    return _ReducedAnswer(rows, sum(answer.computed for answer in answers), sum(answer.received for answer in answers))


@cache
def _caller() -> str:
    """Names this process to the shards."""
    return str(ray.get_runtime_context().get_worker_id())


_steps = count(1)
_NO_ROWS = np.empty((0, 0), np.float32)
