"""Computes the release of a step in several threads; each thread handles a chunk of the sequences."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from services.coordinator.ensemble import PartialSums, Rows
from services.coordinator.pending_release import PendingRelease
from services.privacy.mollifiers.rows import prepare
from services.privacy.mollifiers.shaping import SamplingOptions
from services.privacy.protocol import Protocol
from services.reduction import single_threaded_pool

T = TypeVar("T")


class Arithmetic:
    """Runs the mathematics of a step in a thread pool, with one PyTorch thread for each chunk.

    PyTorch's intra-operator threads would synchronize at every operation; the sequences are independent. Until it is
    prepared or used, it imports no PyTorch: where a shard samples, it computes nothing.

    Args:
        threads: the number of chunks on a CPU, computed in parallel.
        device: a PyTorch device. A device other than the CPU computes all sequences in one chunk.
    """

    def __init__(self, threads: int, device: str) -> None:
        self._device = device
        self._chunks = threads if device == "cpu" else 1

    def prepare(self) -> None:
        """Imports PyTorch and starts the threads, so that no token waits for this, or for a compiler."""
        if self._device == "cpu":
            prepare()
        _ = self._pool

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return single_threaded_pool(self._chunks)

    async def distributions(
        self,
        protocol: Protocol,
        rows: Rows,
        options: Sequence[SamplingOptions],
        allowances: Sequence[Sequence[int]] = (),
    ) -> tuple[PendingRelease, ...]:
        """Returns what `protocol` can release for each consecutive chunk of the sequences.

        Args:
            allowances: see `PendingRelease.of`, for the private sequences of all chunks.
        """
        before = [0, *accumulate(map(int, rows.private))]
        work = (
            self._run(
                PendingRelease.of,
                protocol,
                rows.chunk(chunk),
                options[chunk],
                self._device,
                allowances[before[chunk.start] : before[chunk.stop]],
            )
            for chunk in self._divide(len(options))
        )
        return tuple(await asyncio.gather(*work))

    async def combine(self, protocol: Protocol, partials: PartialSums) -> tuple[PendingRelease, ...]:
        """Returns what `protocol` can release for each consecutive chunk of the sequences, from partials."""
        chunks = self._divide(len(partials.private))
        work = (self._run(PendingRelease.combined, protocol, partials.chunk(chunk), self._device) for chunk in chunks)
        return tuple(await asyncio.gather(*work))

    async def sample(
        self, pending: Sequence[PendingRelease], paid: Collection[int], free: Collection[int]
    ) -> dict[int, int]:
        """Samples tokens of some sequences; see `PendingRelease.sample`. Sequences count through all chunks."""
        firsts = accumulate((len(chunk.public) for chunk in pending), initial=0)
        work = []
        for chunk, first in zip(pending, firsts, strict=False):
            own = range(first, first + len(chunk.public))
            chosen = [[at - first for at in places if at in own] for places in (paid, free)]
            work.append(self._run(_sample, chunk, first, *chosen))
        return {at: token for tokens in await asyncio.gather(*work) for at, token in tokens.items()}

    def _divide(self, sequences: int) -> list[slice]:
        ends = [sequences * chunk // self._chunks for chunk in range(self._chunks + 1)]
        return [slice(first, last) for first, last in pairwise(ends) if first < last]

    def _run(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)


def _sample(chunk: PendingRelease, first: int, paid: Collection[int], free: Collection[int]) -> dict[int, int]:
    return {first + at: token for at, token in chunk.sample(paid, free).items()}
