"""Decodes many sequences with an engine, and measures its steps."""

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privmix.engine.engine import PUBLIC, Engine, Request
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.sampling.categorical import draw
from privmix.shards.reducer import Reducer, Reduction, pick
from tests.benchmarks.reduction import RADIUS, reduction
from tests.benchmarks.startup import timed

WARM_UPS = 4
ROUNDS = 3
PROFILED_STEPS = 3
TOP_KERNELS = 15
STAGES = {
    "graph": "_graphs.step",
    "passes": "_model_forward",
    "readers": "_run_readers",
    "head": "model.compute_logits",
}
"""The methods of vLLM's model runner, with ours, that a step may consist of. Those within a graph are not called."""

Use = Callable[[Tensor], Sequence[int] | None]
"""Gets a step's logits, and may return the token of each sequence."""


class Decoding:
    """Decodes sequences together. They start with random contexts, all of them different.

    Args:
        parts: each step draws from them for each sequence.
    """

    def __init__(self, engine: Engine, sequences: int, context: int, parts: Sequence[str]) -> None:
        generator = torch.Generator().manual_seed(context)
        self.sequences = sequences
        self._engine = engine
        self._parts = sorted(parts)
        self._draw = random.Random(0)
        self._texts = {
            f"{context}-{index}": torch.randint(engine.vocabulary, (context,), generator=generator).tolist()
            for index in range(sequences)
        }

    def step(self, readers: int, use: Use | None = None) -> float:
        """Appends a token to each sequence. Returns the seconds from the requests to the tokens.

        Args:
            readers: the number of parts that are drawn for each sequence.
            use: is called with the logits, [S (1 + readers), V]. Tokens are the public row's likeliest by default.
        """
        requests = [
            Request(name, tuple(tokens), (PUBLIC, *sorted(self._draw.sample(self._parts, readers))))
            for name, tokens in self._texts.items()
        ]
        began = time.perf_counter()
        logits = self._engine.logits(requests)
        following = logits[:: 1 + readers].argmax(dim=-1)
        used = None if use is None else use(logits)
        chosen = following.tolist() if used is None else used
        seconds = time.perf_counter() - began
        for tokens, token in zip(self._texts.values(), chosen, strict=True):
            tokens.append(token)
        return seconds

    def end(self) -> None:
        for name in self._texts:
            self._engine.drop_caches(name)


def reducing(sequences: int, readers: int) -> Use:
    """Returns what reduces the rows of a step by the exponential mechanism, to sums and p0 on the host."""
    reducer, given = Reducer(), reduction(Exponential(readers, readers, RADIUS), sequences, readers)

    def use(logits: Tensor) -> None:
        reducer.reduce(logits, given)

    return use


def sampling(sequences: int, readers: int) -> Use:
    """Returns what samples a token of each sequence as a shard with all parts does.

    It does so by the exponential mechanism, and without readers from p0.
    """
    private, count = sequences if readers else 0, max(readers, 1)
    drawn = np.ones((private, count), dtype=np.bool_)
    given = Reduction(Exponential(count, count, RADIUS), (SamplingOptions(),) * sequences, drawn)
    reducer = Reducer()

    def use(logits: Tensor) -> list[int]:
        weighed, cumulative = reducer.weigh(logits, given)
        tokens: list[int] = pick(np.array(draw(weighed.totals.tolist())), cumulative).tolist()
        return tokens

    return use


def step_ms(decoding: Decoding, numbers: Sequence[int], steps: int) -> dict[str, dict[str, float]]:
    """Returns the median milliseconds of a step by the number of readers: of its rows alone, of rows that are reduced
    to the sums that one of several shards sends, and of rows from which the only shard samples.

    The sides take turns, so that they share whatever changes over time. The number 0 stands for public rows alone.
    """
    sides: dict[tuple[int, str], tuple[int, Use | None]] = {}
    for readers in (0, *numbers):
        sides[readers, "rows"] = readers, None
        sides[readers, "sampled"] = readers, sampling(decoding.sequences, readers)
        if readers:
            sides[readers, "reduced"] = readers, reducing(decoding.sequences, readers)
    for side in sides.values():
        for _ in range(WARM_UPS):
            decoding.step(*side)
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for key, side in sides.items():
            decoding.step(*side)
            seconds[key] += [decoding.step(*side) for _ in range(max(1, steps // ROUNDS))]
    measured: dict[str, dict[str, float]] = defaultdict(dict)
    for (readers, kind), each in seconds.items():
        measured[str(readers)][kind] = round(1000 * statistics.median(each), 3)
    return dict(measured)


def stages_ms(engine: Any, decoding: Decoding, numbers: Sequence[int], steps: int) -> dict[str, dict[str, float]]:
    """Returns the mean milliseconds of a step by the number of readers and by stage, each timed on an idle device.

    The engine stays slower.
    """
    seconds: dict[str, float] = defaultdict(float)

    def install(worker: Any) -> None:
        for stage, path in STAGES.items():
            *owners, name = path.split(".")
            owner = worker.model_runner
            for attribute in owners:
                owner = getattr(owner, attribute, None)
            if hasattr(owner, name):
                setattr(owner, name, on_an_idle_device(getattr(owner, name), seconds, stage))

    engine._worker(install)
    found: dict[str, dict[str, float]] = {}
    for readers in (0, *numbers):
        use = on_an_idle_device(reducing(decoding.sequences, readers), seconds, "reduction") if readers else None
        for _ in range(WARM_UPS):
            decoding.step(readers, use)
        seconds.clear()
        total = sum(decoding.step(readers, use) for _ in range(steps))
        stages = {**seconds, "passes": seconds["passes"] - seconds["readers"]}
        stages["other"] = total - sum(stages.values())
        found[str(readers)] = {stage: round(1000 * spent / steps, 3) for stage, spent in stages.items() if spent}
    return found


def on_an_idle_device(method: Callable[..., Any], seconds: dict[str, float], stage: str) -> Callable[..., Any]:
    """Returns the method, which now waits for the device before and after, and adds its seconds."""

    def complete(*arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        wait()
        return result

    measured = timed(complete, seconds, stage)

    def call(*arguments: Any, **options: Any) -> Any:
        wait()
        return measured(*arguments, **options)

    return call


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profile(decoding: Decoding, readers: int) -> dict[str, Any]:
    """Returns what the device does in a step that samples: milliseconds, kernels, and the host's launches.

    `profiled_ms` is the duration of a step under the profiler, which slows the host down.
    """
    use = sampling(decoding.sequences, readers)
    for _ in range(WARM_UPS):
        decoding.step(readers, use)
    plain_ms = 1000 * statistics.median(decoding.step(readers, use) for _ in range(PROFILED_STEPS))
    with torch.profiler.profile() as profiler:
        seconds = sum(decoding.step(readers, use) for _ in range(PROFILED_STEPS))
    events = profiler.events() or []
    on_device = [event for event in events if event.device_type.name == "CUDA"]
    launches = Counter(event.name for event in events if "Launch" in event.name)
    spent: dict[str, float] = defaultdict(float)
    for event in on_device:
        spent[event.name] += event.time_range.elapsed_us() / 1000 / PROFILED_STEPS
    busy_ms = _covered_us([(event.time_range.start, event.time_range.end) for event in on_device])
    busy_ms /= 1000 * PROFILED_STEPS
    return {
        "step_ms": round(plain_ms, 3),
        "profiled_ms": round(1000 * seconds / PROFILED_STEPS, 3),
        "busy_ms": round(busy_ms, 3),
        "busy_over_step": round(busy_ms / plain_ms, 3),
        "kernels": round(len(on_device) / PROFILED_STEPS),
        "launches": {name: round(count / PROFILED_STEPS, 1) for name, count in launches.items()},
        "top_ms": {name[:80]: round(ms, 3) for name, ms in _largest(spent)},
    }


def _largest(spent: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(spent.items(), key=lambda item: -item[1])[:TOP_KERNELS]


def _covered_us(ranges: Sequence[tuple[float, float]]) -> float:
    """Returns the length of the union of ranges of time."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(ranges):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
