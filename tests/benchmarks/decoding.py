"""Decodes many sequences with an engine, and measures its steps."""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from privmix.engine.engine import PUBLIC, Engine, Request
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.sampling.categorical import draw
from privmix.shards.reducer import Reducer, Reduction, pick

WARM_UPS = 4
ROUNDS = 3
RADIUS = 1.6

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
    drawn = np.ones((sequences, readers), dtype=np.bool_)
    given = Reduction(Exponential(readers, readers, RADIUS), (SamplingOptions(),) * sequences, drawn)
    reducer = Reducer()

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


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
