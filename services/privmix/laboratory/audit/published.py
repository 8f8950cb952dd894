"""Computes what each published claim states for a number of tokens, beside the exact cost of the worst known pair.

- **PMixED.** The mollifier bounds the Rényi divergence at one order. Theorem 5.1 of Flemings et al. 2024 concludes from
  it a bound between two means, which needs the bound at every order. So one part may raise a rare token's probability
  by a large factor, and the others lower it by a larger one. The ball depends on the number of drawn parts, so the
  models lie outside all balls, and the mollifier itself moves them to the border of each.
- **AdaPMixED.** The loss is measured on one text, with each part left out (Flemings et al. 2024b, equation 3). A text
  whose parts all agree measures nothing, and its neighbour with one part that differs is as far as any. The screening
  looks at the likeliest tokens alone, so it does not see a rare one.
- **SubMix.** Losses are charged for the answers that were given (Ginart et al. 2022, definition 2.4). What follows STOP
  is not part of the claim: the public model answers, where the neighbour's other parts go on.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite, log

import numpy as np
from scipy.optimize import brentq

from privmix.laboratory.audit import distributions
from privmix.laboratory.audit.worlds import NEVER, World, removed, worst_of_pmixed
from privmix.privacy import accounting
from privmix.privacy.accounting import planning
from privmix.privacy.arrays import Reals
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.adapmixed import AdaPMixedSettings
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings, PublishedEvent
from privmix.privacy.protocols.submix import SubMix

# The probabilities of the rare token to try; the service keeps tokens down to 2**-36.
_RARE = 2.0 ** -np.arange(6.0, 36.0)
# The probability of the rare token under the attacked part, and its logarithm under others that avoid it.
_LIKELY, _UNLIKELY = 0.5, -40.0
# The Rényi order of PMixED's accounting, and SubMix's main setting: its order and its budget at it.
_ORDER, _SUBMIX_ORDER, _SUBMIX_EPSILON = 3, 2.0, 2.0


@dataclass(frozen=True)
class Claim:
    """What is stated of some tokens, and what they cost in the worst known case.

    Attributes:
        q: the probability of drawing a part; None where all parts answer.
        stated: the epsilon that the claim states.
        worst: the exact epsilon of the worst known pair, at the same delta.
    """

    claim: str
    parts: int
    q: float | None
    tokens: int
    stated: float
    worst: float

    def row(self) -> dict[str, object]:
        """Returns the row of a table, or JSON data."""
        worst = self.worst if isfinite(self.worst) else "unbounded"
        return {**asdict(self), "worst": worst, "exceeded": self.worst > self.stated}


def of_pmixed(parts: int, q: float, epsilon: float, delta: float, tokens: int) -> Iterator[Claim]:
    """Yields the claims of the published and of the certified mollifier at one budget.

    Raises:
        ValueError: the budget leaves nothing to spend at the published order.
    """
    budget = {"q": q, "epsilon": epsilon, "delta": delta, "tokens": tokens}
    worst = against(PMixedSettings(mollifier="renyi", order=_ORDER, **budget).plan(parts), tokens, delta)
    yield Claim("PMixED, Theorem 5.1", parts, q, tokens, epsilon, worst)
    certified = PMixedSettings(**budget).plan(parts)
    assert certified.radius is not None
    laws = distributions.pair_laws(certified, worst_of_pmixed(parts, q, certified.radius))
    stated = planning.cost(certified.event, tokens, delta).epsilon
    yield Claim("PMixED here, ratio", parts, q, tokens, stated, distributions.tokens_epsilon(*laws, tokens, delta))


def of_adapmixed(parts: int, delta: float, tokens: int) -> Iterator[Claim]:
    """Yields the claims for the texts with and without one part, for the rare token that tells them apart best."""
    protocol = AdaPMixedSettings(mollifier="renyi", delta=delta, tokens=tokens).plan(parts)
    tried = []
    for rare in _RARE:
        public = np.append(np.full(protocol.top_k, (1 - rare) / protocol.top_k), rare)
        row = np.append(np.full(protocol.top_k, (1 - _LIKELY) / protocol.top_k), _LIKELY)
        rows = np.log(np.stack([public, row]))
        with_part, loss = _released(protocol, rows[0], rows, (0,) * (parts - 1) + (1,))
        without, none = _released(protocol, rows[0], rows, (0,) * (parts - 1))
        tried.append((distributions.tokens_epsilon(with_part, without, tokens, delta), loss, none))
    worst, *losses = max(tried)
    for text, each in zip(("with", "without"), losses, strict=True):
        stated = accounting.epsilon(np.array([tokens * each]), delta, [protocol.order]).epsilon
        yield Claim(f"AdaPMixED, measured on the text {text} the part", parts, None, tokens, stated, worst)


def of_submix(parts: int, delta: float, tokens: int) -> Iterator[Claim]:
    """Yields the claims for the answers that are charged, all of it to the first, and for all that a client sees."""
    protocol = SubMix(parts, _SUBMIX_ORDER, _SUBMIX_EPSILON / tokens)
    stated = _SUBMIX_EPSILON + log(1 / delta) / (_SUBMIX_ORDER - 1)
    worst = max(_charged_at_once(protocol, rare, delta) for rare in np.log(_RARE))
    yield Claim("SubMix, the answers that are charged", parts, None, tokens, stated, worst)
    # The part alone says the second token, and its loss exceeds the budget at once: the public model answers all.
    public, others = _two(np.log(0.5)), _two(np.log1p(-0.01 / parts**2))
    rows, of_others = np.stack([others, _two(NEVER)]), (0,) * 2 * (parts - 1)
    assert _released(protocol, public, rows, (*of_others, 1, 1))[1] > _SUBMIX_EPSILON
    without, _ = _released(protocol, public, rows, of_others)
    worst = distributions.tokens_epsilon(np.exp(public), without, tokens, delta)
    yield Claim("SubMix, with what follows STOP", parts, None, tokens, stated, worst)


def _charged_at_once(protocol: SubMix, rare: float, delta: float) -> float:
    """Returns the epsilon of one token on which a part spends what it has, in a world where the others say p0."""
    public = _two(rare)

    def answered(likely: float) -> tuple[Reals, float]:
        rows = np.stack([public, _two(likely)])
        return _released(protocol, public, rows, (0,) * 2 * (protocol.parts - 1) + (1, 1))

    def excess(likely: float) -> float:
        return answered(likely)[1] - _SUBMIX_EPSILON

    likely = np.log(0.999)
    if excess(likely) > 0:  # the root from below: the loss must not exceed the budget
        likely = brentq(excess, rare, likely, xtol=1e-9) - 1e-8
    return distributions.tokens_epsilon(answered(likely)[0], np.exp(public), 1, delta)


def _released(protocol: Protocol, public: Reals, rows: Reals, models: tuple[int, ...]) -> tuple[Reals, float]:
    """Returns the law of a token that models of these kinds answer, and the largest loss that it is charged."""
    release = protocol.distribution(distributions.answers(World(public, rows, ()), [models]))
    weights, losses = release.weights[0].double().numpy(), release.losses
    assert losses is not None
    return weights / weights.sum(), float(losses[0].max())


def against(protocol: PMixed, tokens: int, delta: float) -> float:
    """Returns the largest epsilon of all tokens over the probabilities of the rare token.

    Raises:
        ValueError: the protocol has the other mollifier.
    """
    if not isinstance(protocol.event, PublishedEvent):
        raise ValueError("mollifier must be renyi")
    tried = []
    for rare in _RARE:
        for others in (_UNLIKELY, np.log(rare)):
            rows = np.stack([_two(others), _two(np.log(_LIKELY))])
            pair = removed(_two(np.log(rare)), rows, (0,) * (protocol.parts - 1) + (1,))
            laws = distributions.pair_laws(protocol, pair)
            tried.append(distributions.tokens_epsilon(*laws, tokens, delta))
    return max(tried)


def _two(log_first: float) -> Reals:
    return np.array([log_first, np.log1p(-np.exp(log_first))])
