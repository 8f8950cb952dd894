"""The ensemble as the coordinator sees it: models by number, in blocks spread over shards."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from zlib import crc32

import numpy as np
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError

from services import tracing
from services.coordinator.copies import Copies
from services.coordinator.messages import Unavailable
from services.engine.engine import PUBLIC, Request
from services.fleet.shard_map import ShardMap

# A block, and the order in which its copies are asked.
_Destination = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Query:
    """One token's question: a sequence's whole context, and the numbers of the models drawn for it."""

    sequence: str
    tokens: tuple[int, ...]
    models: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Log-probabilities, float32: `public` [queries, V]; `drawn` [sum of models drawn, V], grouped by query."""

    public: torch.Tensor
    drawn: torch.Tensor


class Ensemble:
    """Asks all blocks of a shard map at once. Any of them answers for the public model, each sequence has its own.

    `actor` finds a shard by its name. A shard with copies that does not answer within `patience_s` is asked no longer
    alone; nothing is waited for longer than `timeout_s`.
    """

    def __init__(
        self, shard_map: ShardMap, actor: Callable[[str], ActorHandle], timeout_s: float, patience_s: float
    ) -> None:
        self._models = [dict(block.models) for block in shard_map.groups]
        self._copies = [Copies([actor(name) for name in block.shards], patience_s) for block in shard_map.groups]
        self._block_of = {model: index for index, models in enumerate(self._models) for model in models}
        self._timeout_s = timeout_s

    async def ask(self, queries: Sequence[Query]) -> Rows:
        """The rows of every model drawn, and the public row of every query.

        Raises:
            Unavailable: a block failed or did not answer in time. No model is ever left out of a draw instead: that
                would be another mechanism.
        """
        requests = self._requests(queries)
        with tracing.span("ask"):
            # The first call brings the public row of the first query, whatever was drawn. Which others there are is
            # the draw, so no trace shows them.
            traces = chain([tracing.traceparent()], repeat(None))
            calls = asyncio.gather(
                *(
                    self._copies[block].next_token(order, asked, trace)
                    for ((block, order), asked), trace in zip(requests.items(), traces, strict=False)
                )
            )
            try:
                answers = await asyncio.wait_for(calls, self._timeout_s)
            except (RayError, TimeoutError) as error:
                raise Unavailable("an ensemble shard does not answer") from error
        return self._assemble(queries, requests, answers)

    def release(self, sequences: Sequence[str]) -> None:
        for copies in self._copies:
            copies.release(sequences)

    async def resident_bytes(self) -> list[int]:
        found = await asyncio.gather(*(copies.resident_bytes() for copies in self._copies))
        return [size for sizes in found for size in sizes]

    def _requests(self, queries: Sequence[Query]) -> dict[_Destination, list[Request]]:
        requests: dict[_Destination, list[Request]] = defaultdict(list)
        for query in queries:
            adapters: dict[int, list[str]] = defaultdict(list)
            adapters[self._public_block(query)].append(PUBLIC)
            for model in query.models:
                block = self._block_of[model]
                adapters[block].append(self._models[block][model])
            for block, names in adapters.items():
                order = self._copies[block].choice(_number(query.sequence))
                requests[block, order].append(Request(query.sequence, query.tokens, tuple(names)))
        return requests

    def _public_block(self, query: Query) -> int:
        return _number(query.sequence) % len(self._copies)

    def _assemble(
        self, queries: Sequence[Query], requests: Mapping[_Destination, list[Request]], answers: Sequence[np.ndarray]
    ) -> Rows:
        """Put the rows back in the order of the queries."""
        rows = {
            (block, request.sequence): own
            for ((block, _), asked), answer in zip(requests.items(), answers, strict=True)
            for request, own in zip(asked, _split(answer, asked), strict=True)
        }
        public: list[np.ndarray] = []
        drawn: list[np.ndarray] = []
        for query in queries:
            following = {block: iter(rows[block, query.sequence]) for block in self._blocks_of(query)}
            public.append(next(following[self._public_block(query)]))
            drawn += (next(following[self._block_of[model]]) for model in query.models)
        return Rows(_stack(public), _stack(drawn, public[0].shape))

    def _blocks_of(self, query: Query) -> set[int]:
        return {self._public_block(query), *(self._block_of[model] for model in query.models)}


def _number(sequence: str) -> int:
    return crc32(sequence.encode())


def _split(answer: np.ndarray, requests: Sequence[Request]) -> list[np.ndarray]:
    ends = np.cumsum([len(request.adapters) for request in requests])
    return np.split(answer, ends[:-1])


def _stack(rows: Sequence[np.ndarray], shape: tuple[int, ...] = ()) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, *shape)
