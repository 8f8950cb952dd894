"""Reduces the rows of a step beside the engine that computed them: of a sequence, a total leaves the shards.

The coordinator draws and fixes every parameter; a shard computes what its parts add (`Protocol.partial`). Every shard
shapes its parts against the same p0, the one that the token is sampled from. Each shard computes a public row of its
own, but two of them may differ by their rounding, and the variance that an individual budget pays for, and the ball of
PMixed, are those under p0. So the first group's shard reduces its rows at once (`Reducer.begin`) and sends p0 to the
others, which keep their rows on the device until p0 arrives. They send it what their parts add (`Reducer.partial`). It
adds that up to the integer weights (`Reducer.weights`), and makes a token of a point below their total (`pick`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from threading import Barrier
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from privmix.foundation.lazily import torch
from privmix.privacy import reduction
from privmix.privacy.mollifiers.blocks import on_device
from privmix.privacy.mollifiers.rows import prepare
from privmix.privacy.mollifiers.shaping import SamplingOptions, begin_public, check_usable
from privmix.privacy.protocol import Partial, Protocol
from privmix.privacy.sampling.categorical import accumulated, quantise, tokens_at

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

NO_POINT = -1
"""Stands for the point of a request that gets no token."""


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
class Begun:
    """Holds what the rows of the first group make of a call, on their device.

    Attributes:
        public: float32 [requests, V], p0 of each request.
        usable: bool [requests], whether it is a distribution.
        sums: [S, V], what the group's own parts add to the private requests (`Partial`); None if S is 0.
        charges: int64 [S, n]; None without accounts.
    """

    given: Reduction
    public: Tensor
    usable: Tensor
    sums: Tensor | None
    charges: Tensor | None

    def leaving(self, values: Tensor) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
        """Returns values and the charges in host memory, after one wait for the device.

        Raises:
            ValueError: a public row is not a distribution.
        """
        left, charges, usable = to_host(values, self.charges, self.usable)
        assert left is not None
        assert usable is not None
        check_usable(torch.from_numpy(usable))
        return left, charges


class Reducer:
    """Reduces rows on their device.

    On a CPU it gives each thread a chunk of the sequences, because PyTorch's own threads would meet at every operation.
    """

    def __init__(self) -> None:
        prepare(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # so that no token waits for a compiler
        self._threads = torch.get_num_threads()
        self._pool = single_threaded_pool(self._threads)

    def begin(self, rows: Tensor, given: Reduction) -> Begun:
        """Computes p0 and the partial of the first group. Nothing waits for the device.

        Args:
            rows: [rows, V], logits, since p0 and ratios are normalised here.
        """
        public, usable = self._public(rows, given)
        return Begun(given, public, usable, *self._partial(rows, given, public))

    def partial(
        self, rows: Tensor, given: Reduction, public: NDArray[np.float32]
    ) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
        """Computes the partial of another group.

        Args:
            public: float32 [S, V], p0 of each private request, from the first group.

        Returns:
            [S, V], the sums, as `Protocol.narrowed`; their charges, int64 [S, n], None without accounts.
        """
        sums, charges = self._partial(rows, given, _borrowed(public, rows.device))
        assert sums is not None
        left, own = to_host(given.protocol.narrowed(sums), charges)
        assert left is not None
        return left, own

    def weights(self, begun: Begun, others: Sequence[NDArray[Any]] = ()) -> Tensor:
        """Computes the sampling weights of each request, once there is what all parts of its draw add.

        They stay on the device; a point below a request's total is a token (`pick`).

        Args:
            others: the sums of the other groups, as they left their shards.

        Returns:
            int64 [requests, V], the weights up to each token.

        Raises:
            ValueError: see `Protocol.added`.
        """
        protocol, public, private = begun.given.protocol, begun.public, len(begun.given.drawn)
        cumulative = torch.empty(public.shape, dtype=torch.int64, device=public.device)
        partials = [_borrowed(sums, public.device) for sums in others]

        def accumulate_private(s: slice) -> None:
            assert begun.sums is not None
            own = begun.sums[s]
            added = protocol.added([own, *(partial[s] for partial in partials)]) if partials else own
            cumulative[:private][s] = accumulated(protocol.combine(public[:private][s], added).weights)

        def accumulate_public(s: slice) -> None:
            cumulative[private:][s] = accumulated(quantise(public[private:][s]))

        if private:
            self._each(private, public, accumulate_private)
        if private < len(public):
            self._each(len(public) - private, public, accumulate_public)
        return cumulative

    def _public(self, rows: Tensor, given: Reduction) -> tuple[Tensor, Tensor]:
        """Returns p0 of each request, and which of them are usable."""
        sequences, parts = given.drawn.shape
        asked = torch.cat([_private(rows, given)[:, 0], rows[sequences * (1 + parts) :]])
        shaped = self._each(len(asked), asked, lambda s: begin_public(asked[s], given.options[s]))
        public, usable = (torch.cat(each) for each in zip(*shaped, strict=True))
        return public, usable

    def _partial(self, rows: Tensor, given: Reduction, public: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the sums of the private requests, and their charges; None if there are none."""
        log_p = _private(rows, given)[:, 1:]
        drawn = on_device(given.drawn, public.device)
        allowances = None if given.allowances is None else on_device(given.allowances, public.device)

        def of(s: slice) -> Partial:
            granted = None if allowances is None else allowances[s]
            return reduction.reduce(given.protocol, public[s], log_p[s], given.options[s], drawn[s], granted)

        partials = self._each(len(log_p), public, of) if len(log_p) else []
        charges = [partial.charges for partial in partials if partial.charges is not None]
        sums = torch.cat([partial.sums for partial in partials]) if partials else None
        return sums, torch.cat(charges) if charges else None

    def _each(self, sequences: int, rows: Tensor, work: Callable[[slice], T]) -> list[T]:
        """Returns the results for consecutive chunks of the sequences, each computed by a thread of its own."""
        chunks = _chunks(sequences, self._threads if rows.device.type == "cpu" else 1)
        return [work(chunks[0])] if len(chunks) == 1 else list(self._pool.map(work, chunks))


def pick(points: NDArray[np.int64], cumulative: Tensor) -> NDArray[np.int64]:
    """Returns the tokens in which points lie (`Reducer.weights`), int64 [requests]: those of `categorical.sample`.

    Args:
        points: int64 [requests]; `NO_POINT` for a request that gets no token, whose place in the result has no meaning.

    Raises:
        ValueError: there is not one point for each request, from 0 to below its total.
    """
    tokens = None
    if len(points) == len(cumulative) and not (points < NO_POINT).any():
        tokens = on_host(tokens_at(on_device(np.array(points), cumulative.device), cumulative))
    if tokens is None or (tokens >= cumulative.shape[1]).any():
        raise ValueError("points must be from 0 to below the total of each request")
    return tokens


def _borrowed(values: NDArray[Any], device: torch.device) -> Tensor:
    """Returns values that another process owns, and that nobody may write to, on a device."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # PyTorch warns of memory that is read-only
        return on_device(values, device)


def on_host(values: Tensor) -> NDArray[Any]:
    """Returns the values in host memory; see `to_host`."""
    (host,) = to_host(values)
    assert host is not None
    return host


def to_host(*values: Tensor | None) -> list[NDArray[Any] | None]:
    """Returns all values in host memory, after one wait for their device; those of a CPU's tensor are shared with it.

    A GPU writes to page-locked memory, which PyTorch keeps for the next call, 6 to 7 times as fast as to new pages
    (`copy_ms` of `tests/benchmarks/gpu_stages.py` at commit 971ea1ef).
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
    torch._C.set_num_threads(before)  # vLLM, on a CPU, replaces `torch.set_num_threads` by one that does nothing
    return pool


def _use_one_thread() -> None:
    torch.get_num_threads()  # a thread's first use of PyTorch sets the process's number, also after another was set
    torch._C.set_num_threads(1)


def _private(rows: Tensor, given: Reduction) -> Tensor:
    """Returns the rows of the private requests, [S, 1 + n, V]."""
    sequences, parts = given.drawn.shape
    return rows[: sequences * (1 + parts)].view(sequences, 1 + parts, rows.shape[1])


def _chunks(sequences: int, count: int) -> list[slice]:
    """Divides sequences into at most ``count`` chunks; one for fewer sequences, which PyTorch's threads divide."""
    if sequences < count:
        return [slice(0, sequences)]
    bounds = [sequences * chunk // count for chunk in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]
