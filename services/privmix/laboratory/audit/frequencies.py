"""Tests counts of draws and tokens against the distributions that the protocol describes.

The likelihood-ratio test bounds epsilon, and a wrong draw or re-used noise may hardly change epsilon. These tests
compare the draws with the protocol's description itself: exact binomial tests whose joint false-alarm rate is 1e-6.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from privmix.laboratory.audit.finding import CERTAIN, Finding
from privmix.privacy.arrays import Reals
from privmix.privacy.protocol import Protocol

ATTACK = "frequencies of draws"


@dataclass(frozen=True)
class DrawLaw:
    """The distribution of a protocol's draws, by its description.

    Attributes:
        sizes: the probability of each number of parts.
        part: the probability that a draw contains a given part.
        repeated: the probability that two draws are the same set.
    """

    sizes: Mapping[int, float]
    part: float
    repeated: float


def draw_law(protocol: Protocol) -> DrawLaw:
    """Returns the distribution of `Protocol.draw` by the description: draws of the same size are equally likely."""
    models = protocol.models
    sizes = {size: chance for (size,), chance in protocol.draws((models,)).items()}
    part = sum(chance for (own, _), chance in protocol.draws((1, models - 1)).items() if own)
    return DrawLaw(sizes, part, sum(chance**2 / math.comb(models, size) for size, chance in sizes.items()))


def audit_draws(protocol: Protocol, draws: int, subject: str | None = None) -> Finding:
    """Compares ``draws`` draws with their distribution: number of parts, each part, and repeated sets."""
    law = draw_law(protocol)
    samples = [protocol.draw() for _ in range(draws)]
    sizes = np.bincount([len(drawn) for drawn in samples])
    models = np.bincount([model for drawn in samples for model in drawn], minlength=protocol.models)
    tests = [
        OutcomeCount(f"{size} parts", int(count), draws, law.sizes.get(size, 0.0)) for size, count in enumerate(sizes)
    ]
    tests += [OutcomeCount(f"model {model}", int(count), draws, law.part) for model, count in enumerate(models)]
    repeats = sum(first == second for first, second in zip(samples[::2], samples[1::2], strict=False))
    tests.append(OutcomeCount("the same draw twice", repeats, draws // 2, law.repeated))
    return Finding.of_description(
        ATTACK, protocol, subject, CERTAIN, refuted(tests), {"draws": draws, "tests": len(tests)}
    )


def token_counts(law: Reals, tokens: NDArray[np.int64], world: str) -> list["OutcomeCount"]:
    """Counts each token, and equal tokens in consecutive trials, which re-used noise or draws would change."""
    chances = law / law.sum()
    counts = np.bincount(tokens, minlength=len(law))
    tests = [
        OutcomeCount(f"token {token} {world}", int(count), len(tokens), float(chances[token]))
        for token, count in enumerate(counts)
    ]
    pairs = len(tokens) // 2
    same = int((tokens[: 2 * pairs : 2] == tokens[1 : 2 * pairs : 2]).sum())
    return [*tests, OutcomeCount(f"the same token twice {world}", same, pairs, float((chances**2).sum()))]


@dataclass(frozen=True)
class OutcomeCount:
    """The number of occurrences of an outcome in ``trials`` independent trials, and its ``chance`` in each."""

    what: str
    count: int
    trials: int
    chance: float

    @property
    def p_value(self) -> float:
        """The p-value of the two-sided exact binomial test."""
        return float(binomtest(self.count, self.trials, min(1.0, max(0.0, self.chance))).pvalue) if self.trials else 1.0


def refuted(counts: Sequence[OutcomeCount]) -> tuple[str, ...]:
    """Describes the counts that contradict their probabilities. The joint false-alarm rate is 1 - `CERTAIN`."""
    return tuple(
        f"{count.what}: {count.count} of {count.trials}; the claimed fraction is {count.chance:.4g}"
        for count in counts
        if count.p_value < (1 - CERTAIN) / len(counts)
    )
