"""Measures the mathematics of a token: `python -m tests.benchmarks.mollify --json`.

For each protocol and number of part rows:

- `ms_per_row`: time from log-probabilities to integer weights. `ms_per_row_released` is the part of the projection,
  the mean and the weights; the rest is for the sampling options.
- `passes`: bytes that the operations read and write, over the bytes of the log-probabilities.
- `bandwidth_share`: the time for those bytes at the measured copy bandwidth, over the measured time; above 1 if blocks
  stay in the cache.
- `floor_share`: the same for the minimum traffic, every tensor between the stages moved once (log-probabilities read,
  ratios written and read, weights written).
- `scipy_ratio`: time of SciPy's bisection for the same projections and mean, one row at a time (and the parts' losses,
  one part at a time), over the time of the release; null if a protocol needs no solver.
- `peak_memory`: the peak of resident memory, log-probabilities included, over the bytes of the log-probabilities.

Times are the minimum of several repetitions, because other load only adds time.
"""

import ctypes
import gc
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from scipy.optimize import bisect
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from privmix.privacy.accounting.published import largest_beta
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Protocol, Release
from privmix.privacy.protocols.adapmixed import AdaPMixed
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.gnmax import GNMax
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import PMixed
from privmix.privacy.protocols.submix import SubMix
from privmix.privacy.protocols.subsample_aggregate import SubsampleAggregate
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import show

VOCABULARY = 49152
# Likelihood ratios reach from vanishing to the inverse of the support floor, and so may the normaliser.
NORMALISERS = 2.0**-96, 2.0**48
PARTS, RADIUS, TOKENS, ORDER, LOSS = 80, 1.6, 1024, 3, 8 / 1024
BOUND = ORDER * largest_beta(ORDER, 1.0, 8, LOSS)
SUBMIX_ORDER, SUBMIX_BETA = 4.0, 4.9 / 1024
ADAPMIXED_ORDER = 18.0
Row = NDArray[np.float64]
# Functions from p0 [V] and one sequence's rows [n, V] to the sampled distribution [V].
Slow = Callable[[Row, Row], Row]


def log_probabilities(sequences: int, group: int) -> tuple[Tensor, Tensor]:
    """Returns public rows [S, V] shaped like a language model's, and parts with log-ratios to them of N(0, 0.7)."""
    generator = torch.Generator().manual_seed(0)
    falling = -1.5 * torch.log(torch.arange(1, VOCABULARY + 1, dtype=torch.float32))
    public = torch.stack([falling[torch.randperm(VOCABULARY, generator=generator)] for _ in range(sequences)])
    public += torch.randn(public.shape, generator=generator)
    parts = public.repeat_interleave(group, 0)
    parts += 0.7 * torch.randn(parts.shape, generator=generator)
    return public.log_softmax(1), parts.log_softmax(1)


def shortest(work: Callable[[Tensor], Any], given: Tensor, repeats: int) -> float:
    """Returns the minimum seconds of ``work`` on a copy of ``given``."""
    seconds = []
    for _ in range(1 + repeats):
        copy = given.clone()
        begun = time.perf_counter()
        work(copy)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def copy_bandwidth() -> float:
    """Returns the bytes per second, read and written, of a copy far larger than the caches."""
    source = torch.ones(2**26)
    target = torch.zeros_like(source)
    return 2 * source.numel() * 4 / shortest(target.copy_, source, 10)


def clip_by_scipy(p0: Row, p: Row) -> Row:
    low, high = math.exp(-RADIUS) * p0, math.exp(RADIUS) * p0
    nu = bisect(lambda nu: float(np.clip(p / nu, low, high).sum()) - 1, *NORMALISERS)
    return np.asarray(np.clip(p / nu, low, high))


def mix_by_scipy(p0: Row, p: Row) -> Row:
    u = p / p0

    def excess(weight: float) -> float:
        return max((1 + weight * (u - 1)).max() - math.exp(RADIUS), math.exp(-RADIUS) - (1 + weight * (u - 1)).min())

    weight = 1.0 if excess(1) <= 0 else bisect(excess, 0, 1)
    return weight * p + (1 - weight) * p0


def renyi_by_scipy(p0: Row, p: Row) -> Row:
    def excess(weight: float) -> float:
        mixed = weight * p + (1 - weight) * p0
        moments = (mixed**ORDER * p0 ** (1 - ORDER)).sum(), (p0**ORDER * mixed ** (1 - ORDER)).sum()
        return math.log(max(moments)) / (ORDER - 1) - BOUND

    weight = 1.0 if excess(1) <= 0 else bisect(excess, 0, 1)
    return weight * p + (1 - weight) * p0


def one_by_one(project: Callable[[Row, Row], Row], p0: Row, parts: Row) -> Row:
    """Returns the mean of one sequence's projected rows [n, V]."""
    mean = np.zeros_like(p0)
    for p in parts:
        mean += project(p0, p) / len(parts)
    return mean


def submix_by_scipy(p0: Row, halves: Row) -> Row:
    """Computes each pair's lambda by bisection, the sampled mixture [V], and the parts' losses, one at a time."""
    weights = []
    for first, second in halves.reshape(-1, 2, len(p0)):

        def excess(weight: float, first: Row = first, second: Row = second) -> float:
            p, q = weight * first + (1 - weight) * p0, weight * second + (1 - weight) * p0
            return math.log((p**SUBMIX_ORDER * q ** (1 - SUBMIX_ORDER)).sum()) / (SUBMIX_ORDER - 1) - SUBMIX_BETA

        weights.append(1.0 if excess(1) <= 0 else bisect(excess, 0, 1))

    def mixture(kept: NDArray[np.bool_]) -> Row:
        weight = np.mean(np.array(weights)[kept])
        return np.asarray(weight * halves[np.repeat(kept, 2)].mean(axis=0) + (1 - weight) * p0)

    return losses_one_by_one(mixture, len(weights), SUBMIX_ORDER)


def adapmixed_by_scipy(p0: Row, parts: Row) -> Row:
    """Computes the mean [V] of the projected rows and the parts' losses, one at a time, without the screening."""
    rows = np.array([clip_by_scipy(p0, p) for p in parts])
    return losses_one_by_one(lambda kept: np.asarray(rows[kept].mean(axis=0)), len(rows), ADAPMIXED_ORDER)


def losses_one_by_one(mean: Callable[[NDArray[np.bool_]], Row], parts: int, order: float) -> Row:
    """Computes the losses from the mean of all parts [V] and the means without each part."""
    p = mean(np.ones(parts, dtype=np.bool_))
    for part in range(parts if parts > 1 else 0):
        without = mean(np.arange(parts) != part)
        moments = (p**order * without ** (1 - order)).sum(), (without**order * p ** (1 - order)).sum()
        math.log(max(moments))
    return p


def peak_memory(work: Callable[[Tensor], Any], copy: Tensor, given: int) -> float:
    """Returns the peak of resident memory, including the ``given`` bytes of input, over these bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    work(copy)
    return 1 + (resident("VmHWM") - before) / given


class MemoryTraffic(TorchDispatchMode):
    """Counts the bytes that operations read (tensor arguments) and write (results). Views count as 0."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith("empty"):
            read = args[1:] if name in {"copy_", "zero_"} else args
            self.moved += sum(leaf.nbytes for leaf in tree_leaves((read, result)) if isinstance(leaf, Tensor))
        return result


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))


# Protocols that may take this number of rows for a token, and what SciPy does instead.
PROTOCOLS: Mapping[str, tuple[Callable[[int], Protocol], Slow | None]] = {
    "pmixed ratio clip": (lambda rows: PMixed(PARTS, 1.0, RADIUS), partial(one_by_one, clip_by_scipy)),
    "pmixed ratio mix": (
        lambda rows: PMixed(PARTS, 1.0, RADIUS, projection="mix"),
        partial(one_by_one, mix_by_scipy),
    ),
    "pmixed renyi": (
        lambda rows: PMixed(PARTS, 1.0, mollifier="renyi", order=ORDER, loss=LOSS),
        partial(one_by_one, renyi_by_scipy),
    ),
    "adapmixed ratio clip": (lambda rows: AdaPMixed(PARTS, radius=RADIUS, order=ADAPMIXED_ORDER), adapmixed_by_scipy),
    "submix": (lambda rows: SubMix(PARTS, SUBMIX_ORDER, SUBMIX_BETA), submix_by_scipy),
    "exponential": (lambda rows: Exponential(PARTS, rows, RADIUS), None),
    "individual": (lambda rows: IndividualSettings(tokens=TOKENS).plan(rows), None),
    "gnmax": (lambda rows: GNMax(PARTS, sigma=20.0), None),
    "subsample-aggregate": (lambda rows: SubsampleAggregate(PARTS, scale=20.0), None),
}
IN_PAIRS = {"submix", "individual"}  # protocols of two rows at least


def measure(
    of_rows: Callable[[int], Protocol], by_scipy: Slow | None, rows: int, group: int, bandwidth: float, repeats: int
) -> dict[str, float | None]:
    public, parts = log_probabilities(max(1, rows // group), min(group, rows))
    protocol, models = of_rows(min(group, rows)), [tuple(range(min(group, rows)))] * len(public)
    given = 4 * (public.numel() + parts.numel())

    def token(log_parts: Tensor) -> Release:
        return protocol.distribution(shape(public, log_parts, models, overwrite_parts=True))

    peak = peak_memory(token, parts.clone(), given)
    seconds = shortest(token, parts, repeats)
    answers = shape(public, parts, models)
    released = shortest(lambda _: protocol.distribution(answers), public[:0], repeats)
    p0, rows_of_one = answers.public[0].double().numpy(), answers.ratios[: len(models[0])].double().numpy()
    slow = None
    if by_scipy is not None:
        slow = shortest(lambda _: by_scipy(p0, rows_of_one * p0), public[:0], 3) / len(models[0])
    with MemoryTraffic() as traffic:
        token(parts.clone())
    least = given + 8 * parts.numel() + 8 * public.numel()
    return {
        "ms_per_row": 1e3 * seconds / rows,
        "ms_per_row_released": 1e3 * released / rows,
        "passes": traffic.moved / given,
        "bandwidth_share": traffic.moved / bandwidth / seconds,
        "floor_share": least / bandwidth / seconds,
        "scipy_ratio": None if slow is None else slow * rows / released,
        "peak_memory": peak,
    }


def mollify(
    as_json: JsonOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="One small batch, once.")] = False,
    group: Annotated[int, typer.Option(min=1, help="Part rows of a sequence.")] = 8,
    rows: Annotated[list[int], typer.Option(min=1, help="Part rows in a batch; repeatable.")] = [1, 8, 64, 256],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Runs of which the shortest counts.")] = 20,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; by default one a core.")] = None,
    only: Annotated[str, typer.Option(help="Measure the protocols whose names contain this.")] = "",
) -> None:
    """Measures the mathematics of a token."""
    rows, repeats = ([8], 1) if quick else (rows, repeats)
    if threads is not None:
        torch.set_num_threads(threads)
    bandwidth = copy_bandwidth()
    measured = {
        name: {
            str(number): measure(*setting, number, group, bandwidth, repeats)
            for number in rows
            if number > 1 or name not in IN_PAIRS
        }
        for name, setting in PROTOCOLS.items()
        if only in name
    }
    setting = {"vocabulary": VOCABULARY, "rows_per_sequence": group, "threads": torch.get_num_threads()}
    show({**setting, "copy_gb_per_s": bandwidth / 1e9, "protocols": measured}, as_json)


if __name__ == "__main__":
    typer.run(mollify)
