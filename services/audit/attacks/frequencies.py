"""Counts tested directly against the law that they should follow.

The likelihood-ratio test bounds epsilon, which a wrong draw or re-used noise may leave nearly as it is. Here what is
drawn is compared with the protocol's description itself: exact binomial tests, together wrong once in a million times.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from services.audit.report.finding import CERTAIN, Finding
from services.privacy.protocol import Protocol
from services.privacy.worlds import Reals

ATTACK = "frequencies of draws"


@dataclass(frozen=True)
class DrawLaw:
    """The law of a protocol's draws, by its description.

    Attributes:
        sizes: the chance of each number of parts.
        part: the chance that a given part is drawn.
        repeated: the chance that two draws are the same set.
    """

    sizes: Mapping[int, float]
    part: float
    repeated: float


def draw_law(protocol: Protocol) -> DrawLaw:
    """The law of `Protocol.draw`, from the protocol's description: draws of the same size are equally likely."""
    models = protocol.models
    sizes = {size: chance for (size,), chance in protocol.draws((models,)).items()}
    part = sum(chance for (own, _), chance in protocol.draws((1, models - 1)).items() if own)
    return DrawLaw(sizes, part, sum(chance**2 / math.comb(models, size) for size, chance in sizes.items()))


def audit_draws(protocol: Protocol, draws: int, subject: str | None = None) -> Finding:
    """Compare ``draws`` draws with their law: how many parts, which, and how often the same ones come twice."""
    law = draw_law(protocol)
    seen = [protocol.draw() for _ in range(draws)]
    sizes = np.bincount([len(drawn) for drawn in seen])
    models = np.bincount([model for drawn in seen for model in drawn], minlength=protocol.models)
    tests = [Count(f"{size} parts", int(count), draws, law.sizes.get(size, 0.0)) for size, count in enumerate(sizes)]
    tests += [Count(f"model {model}", int(count), draws, law.part) for model, count in enumerate(models)]
    repeats = sum(first == second for first, second in zip(seen[::2], seen[1::2], strict=False))
    tests.append(Count("the same draw twice", repeats, draws // 2, law.repeated))
    return Finding.of_description(
        ATTACK, protocol, subject, CERTAIN, refuted(tests), {"draws": draws, "tests": len(tests)}
    )


def token_counts(law: Reals, tokens: NDArray[np.int64], world: str) -> list["Count"]:
    """Counts each token, and how often the same token comes twice running, which re-used noise or draws change."""
    chances = law / law.sum()
    counts = np.bincount(tokens, minlength=len(law))
    tests = [
        Count(f"token {token} {world}", int(count), len(tokens), float(chances[token]))
        for token, count in enumerate(counts)
    ]
    pairs = len(tokens) // 2
    same = int((tokens[: 2 * pairs : 2] == tokens[1 : 2 * pairs : 2]).sum())
    return [*tests, Count(f"the same token twice {world}", same, pairs, float((chances**2).sum()))]


@dataclass(frozen=True)
class Count:
    """How often something came in ``trials`` independent trials, and its ``chance`` in each."""

    what: str
    count: int
    trials: int
    chance: float

    @property
    def p_value(self) -> float:
        """Of the two-sided exact binomial test."""
        return float(binomtest(self.count, self.trials, min(1.0, max(0.0, self.chance))).pvalue) if self.trials else 1.0


def refuted(counts: Sequence[Count]) -> tuple[str, ...]:
    """Describes the counts that do not follow their chances; together they err with probability 1 - `CERTAIN`."""
    return tuple(
        f"{each.what}: {each.count} of {each.trials}, where {each.chance:.4g} of them are claimed"
        for each in counts
        if each.p_value < (1 - CERTAIN) / len(counts)
    )
