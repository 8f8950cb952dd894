"""Reduces the rows of a step beside the engine that computed them: what leaves a shard is one partial a sequence.

The coordinator draws and fixes every parameter; a shard computes what its parts add (`Protocol.partial`). Every shard
shapes its parts against the same p0, the one that the token is sampled from. Each shard computes a public row of its
own, but two of them may differ by their rounding, and the variance that an individual budget pays for, and the ball of
PMixed, are those under p0. So the first group's shard reduces its rows at once and sends p0; the others keep their rows
on the device until p0 arrives.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from threading import Barrier
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import set_num_threads as _set_num_threads  # vLLM, on a CPU, replaces torch's by one that does nothing

from services.privacy import reduction
from services.privacy.mollifiers.blocks import on_device
from services.privacy.mollifiers.rows import prepare
from services.privacy.mollifiers.shaping import SamplingOptions, begin_public, check_usable
from services.privacy.protocol import Partial, Protocol

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reduction:
    """Says how a shard reduces the rows of a call. It is immutable data, and fixed before the call.

    The first S requests of the call are private, with a public row and n part rows each. The others have a public row.

    Attributes:
        options: the sampling options of each request.
        drawn: bool [S, n], whether a row is that of a part that is drawn. Other rows only fill the shape.
        allowances: int64 [S, n], the most that each token may charge to each part; None without accounts.
    """

    protocol: Protocol
    options: tuple[SamplingOptions, ...]
    drawn: NDArray[np.bool_]
    allowances: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Reduced:
    """Holds what leaves a shard.

    Attributes:
        public: float32 [requests, V], p0 of each request; None if another shard sends it.
        sums: [S, V], the partials of the private requests (`Partial`); None if S is 0.
        charges: int64 [S, n]; None without accounts.
    """

    public: NDArray[np.float32] | None
    sums: NDArray[np.generic] | None
    charges: NDArray[np.int64] | None

    @property
    def nbytes(self) -> int:
        arrays = (self.public, self.sums, self.charges)
        return sum(array.nbytes for array in arrays if array is not None)


class Reducer:
    """Reduces rows on their device.

    On a CPU it gives each thread a share of the sequences, because PyTorch's own threads would meet at every operation.
    """

    def __init__(self) -> None:
        prepare(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # so that no token waits for a compiler
        self._threads = torch.get_num_threads()
        self._pool = single_threaded_pool(self._threads)

    def reduce(self, rows: Tensor, given: Reduction, public: NDArray[np.float32] | None = None) -> Reduced:
        """Reduces the rows of a call, [rows, V]: logits, since p0 and ratios are normalised here.

        Args:
            public: float32 [S, V], p0 of the private requests from another shard. By default the rows' own p0.

        Raises:
            ValueError: a public row is not a distribution.
        """
        sequences, parts = given.drawn.shape
        private = rows[: sequences * (1 + parts)].view(sequences, 1 + parts, rows.shape[1])
        own, usable = None, None
        if public is None:
            asked = torch.cat([private[:, 0], rows[sequences * (1 + parts) :]])
            shaped = self._each(len(asked), asked, lambda s: begin_public(asked[s], given.options[s]))
            own, usable = (torch.cat(each) for each in zip(*shaped, strict=True))
        p0 = own if own is not None else on_device(np.array(public), rows.device)
        partials = self._partials(private[:, 1:], given, p0[:sequences]) if sequences else []
        sums = torch.cat([partial.sums for partial in partials]) if partials else None
        charges = [partial.charges for partial in partials if partial.charges is not None]
        left = to_host(usable, own, sums, torch.cat(charges) if charges else None)
        if left[0] is not None:
            check_usable(torch.from_numpy(left[0]))
        return Reduced(*left[1:])

    def _partials(self, log_p: Tensor, given: Reduction, public: Tensor) -> list[Partial]:
        drawn = on_device(given.drawn, public.device)
        allowances = None if given.allowances is None else on_device(given.allowances, public.device)

        def of(s: slice) -> Partial:
            granted = None if allowances is None else allowances[s]
            return reduction.reduce(given.protocol, public[s], log_p[s], given.options[s], drawn[s], granted)

        return self._each(len(public), public, of)

    def _each(self, sequences: int, rows: Tensor, work: Callable[[slice], T]) -> list[T]:
        """Returns the results for consecutive shares of the sequences, each computed by a thread of its own."""
        shares = _shares(sequences, self._threads if rows.device.type == "cpu" else 1)
        return [work(shares[0])] if len(shares) == 1 else list(self._pool.map(work, shares))


def on_host(values: Tensor) -> NDArray[Any]:
    """Returns the values in host memory; see `to_host`."""
    (host,) = to_host(values)
    assert host is not None
    return host


def to_host(*values: Tensor | None) -> list[NDArray[Any] | None]:
    """Returns all values in host memory, after one wait for their device; those of a CPU's tensor are shared with it.

    A GPU writes to page-locked memory, which PyTorch keeps for the next call, 6 to 7 times as fast as to new pages
    (`python -m tests.benchmarks.gpu`, `copy_ms`).
    """
    copies = [
        value
        if value is None or value.device.type == "cpu"
        else torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        for value in values
    ]
    for device in {value.device for value in values if value is not None and value.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return [None if copy is None else copy.numpy() for copy in copies]


def single_threaded_pool(threads: int) -> ThreadPoolExecutor:
    """Returns a pool of running threads in which each operation of PyTorch runs on its caller's thread alone.

    The number that a thread sets is also the one with which PyTorch, and each library of kernels, starts in other
    threads; so the caller's number is set again once all threads of the pool have set theirs.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=_use_one_thread)
    started = Barrier(threads)
    for waiting in [pool.submit(started.wait) for _ in range(threads)]:
        waiting.result()
    _set_num_threads(before)
    return pool


def _use_one_thread() -> None:
    torch.get_num_threads()  # a thread's first use of PyTorch sets the process's number, also after another was set
    _set_num_threads(1)


def _shares(sequences: int, count: int) -> list[slice]:
    """Divides sequences into at most ``count`` shares; one for fewer sequences, which PyTorch's threads divide."""
    if sequences < count:
        return [slice(0, sequences)]
    bounds = [sequences * share // count for share in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]
