"""The worst known replacements of a part, which follow from a claim alone, and the exact law of a token in each.

The models of a pair are more extreme than a mechanism may release, so an attack finds one that does not limit them.
"""

import math
from collections.abc import Iterable
from functools import singledispatch

import numpy as np
import torch
from torch import Tensor

from privmix.laboratory.audit.distributions import answers, draws
from privmix.laboratory.audit.worlds import NEVER, Pair, World, replaced, worst_of_pmixed
from privmix.privacy.accounting import planning
from privmix.privacy.arrays import Integers, Reals
from privmix.privacy.events import Event
from privmix.privacy.mollifiers.candidates import Candidates
from privmix.privacy.mollifiers.mixture import integer_weights
from privmix.privacy.protocol import Answers, Protocol
from privmix.privacy.protocols import subsample_aggregate
from privmix.privacy.protocols.adapmixed import AdaPMixed, ScreenedRatioEvent
from privmix.privacy.protocols.exponential import FixedSizeExponentialEvent
from privmix.privacy.protocols.gnmax import GNMax, GNMaxEvent, votes
from privmix.privacy.protocols.individual import Individual
from privmix.privacy.protocols.pmixed import RatioEvent
from privmix.privacy.protocols.subsample_aggregate import SubsampleAggregate, SubsampleAggregateEvent

_PAIRS = 16
# The number of standard deviations beyond which the law of a plurality ignores mass.
_REACH = 12.0
# The number of quantiles that represent Laplace noise.
_QUANTILES = 1500
# The largest Rényi order for the comparison of pairs, since larger ones prefer tokens too rare for any attack.
_MAX_ORDER = 8.0


def renyi_divergence(p: Reals, q: Reals, order: float) -> float:
    """Returns the larger of D_a(p||q) and D_a(q||p)."""
    kept = (p > 0) | (q > 0)
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p[kept]), np.log(q[kept])
        moments = [float(np.logaddexp.reduce(a * order + b * (1 - order))) for a, b in ((log_p, log_q), (log_q, log_p))]
    return max(0.0, *moments) / (order - 1)


def worst_pair(protocol: Protocol, claimed: Event, tokens: int, delta: float) -> Pair:
    """Returns the worst known replacement of the last part for a claim about a number of tokens."""
    pairs = list(worst_pairs(claimed, protocol))
    if len(pairs) == 1:
        return pairs[0]
    order = min(_MAX_ORDER, planning.cost(claimed, tokens, delta).best_order)
    return max(pairs, key=lambda pair: renyi_divergence(*pair_laws(protocol, pair), order))


def pair_laws(protocol: Protocol, pair: Pair) -> tuple[Reals, Reals]:
    """Returns the distributions of a token before and after the replacement, each float64 [V]."""
    return token_law(protocol, pair.before), token_law(protocol, pair.after)


def token_law(protocol: Protocol, world: World) -> Reals:
    """Returns the probability of each token, from the protocol's own release for each draw, float64 [V]."""
    keys, chances = draws(protocol, world)
    laws = release_law(protocol, answers(world, keys)).numpy()
    return np.asarray(chances @ laws / chances.sum(), dtype=np.float64)


@singledispatch
def worst_pairs(claimed: Event, protocol: Protocol) -> Iterable[Pair]:
    """Yields candidates for the worst pair of ensembles; of accounts, those of the protocol."""
    if not isinstance(protocol, Individual):
        return
    for log_first in np.linspace(math.log(protocol.lower / 64), np.log(0.5), _PAIRS):
        public = np.array([log_first, np.log1p(-np.exp(log_first))])
        rows = np.vstack([one_hot(2, 0, 1), public])
        for kind in range(3):  # the others agree, or are silent
            yield replaced(public, rows, (kind,) * (protocol.parts - 1), 0, 1)


@worst_pairs.register
def _(claimed: RatioEvent, protocol: Protocol) -> Iterable[Pair]:
    return (worst_of_pmixed(claimed.parts, claimed.q, claimed.radius),)


@worst_pairs.register
def _(claimed: ScreenedRatioEvent, protocol: Protocol) -> Iterable[Pair]:
    """Assumes that every query passes the screening."""
    return (worst_of_pmixed(claimed.parts, 1.0, claimed.radius),)


@worst_pairs.register
def _(claimed: FixedSizeExponentialEvent, protocol: Protocol) -> Iterable[Pair]:
    """Two tokens; the part says the first before and the second after, the others some of each."""
    rows = one_hot(2, 0, 1)
    for log_first in np.linspace(-claimed.radius - 6, np.log(0.5), _PAIRS):
        public = np.array([log_first, np.log1p(-np.exp(log_first))])
        for lifted in sorted({0, (claimed.parts - 1) // 2, claimed.parts - 1}):
            others = (0,) * lifted + (1,) * (claimed.parts - 1 - lifted)
            yield replaced(public, rows, others, 0, 1)
            yield replaced(public[::-1].copy(), rows, others, 0, 1)


@worst_pairs.register
def _(claimed: GNMaxEvent, protocol: Protocol) -> Iterable[Pair]:
    """Some parts vote like the changed part before, and the rest like it after."""
    for vocabulary in (2, 3, 8, 16):
        likeliest = np.linspace(1.0, 0.9, vocabulary)
        yield from _agreeing(claimed.parts, np.log(likeliest / likeliest.sum()))


@worst_pairs.register
def _(claimed: SubsampleAggregateEvent, protocol: Protocol) -> Iterable[Pair]:
    return _agreeing(claimed.parts, np.log([0.49, 0.51]))


def _agreeing(parts: int, public: Reals) -> Iterable[Pair]:
    for agree in range(parts):
        yield replaced(public, one_hot(len(public), 0, 1), (0,) * agree + (1,) * (parts - 1 - agree), 0, 1)


def one_hot(vocabulary: int, *tokens: int) -> Reals:
    """Returns log-probabilities that concentrate on one token in each row, float64 [len(tokens), V]."""
    return np.where(np.arange(vocabulary) == np.array(tokens)[:, None], 0.0, NEVER)


@singledispatch
def release_law(protocol: Protocol, asked: Answers) -> Tensor:
    """Returns the distribution of one token given the draw, float64 [S, V]: the mean of a release over its noise."""
    assert not protocol.noisy
    weights = protocol.distribution(asked).weights.double()
    return weights / weights.sum(dim=1, keepdim=True)


@release_law.register
def _(protocol: AdaPMixed, asked: Answers) -> Tensor:
    """Of a token whose query passes the screening."""
    laws = torch.empty(asked.public.shape, dtype=torch.float64)
    for s, (first, last) in enumerate(asked.spans()):
        rows = protocol._mollified(asked.ratios[first:last], asked.public[s])
        own = Answers(asked.public[s : s + 1], rows, asked.models[s : s + 1])
        laws[s] = integer_weights(own, lambda ratios, public, drawn, out: ratios)[0]
    return laws / laws.sum(dim=1, keepdim=True)


@release_law.register
def _(protocol: GNMax, asked: Answers) -> Tensor:
    """The first of candidates with equal noisy counts wins."""
    candidates = Candidates.of(asked.public, protocol.candidates)
    chances = torch.from_numpy(np.stack([wins(counts, protocol.sigma) for counts in votes(asked, candidates)]))
    chances = torch.where(candidates.kept, chances, 0.0)
    return torch.zeros(asked.public.shape, dtype=torch.float64).scatter_(1, candidates.tokens, chances)


def wins(counts: Integers, sigma: float) -> Reals:
    """Returns each candidate's probability to have the largest noisy count (ties: the first), float64 [k], exactly."""
    reach = math.ceil(_REACH * sigma)
    values = np.arange(-reach, reach + int(counts.max()) + 1)
    masses = np.exp(-((values - counts[:, None]) ** 2) / (2 * sigma**2))
    masses /= masses.sum(axis=1, keepdims=True)
    at_most = masses.cumsum(axis=1)
    below = at_most - masses
    chances = [
        float(np.sum(own * below[:index].prod(axis=0) * at_most[index + 1 :].prod(axis=0)))
        for index, own in enumerate(masses)
    ]
    return np.array(chances)


@release_law.register
def _(protocol: SubsampleAggregate, asked: Answers) -> Tensor:
    """The mean fraction of each of two candidates in the positive sums, by quadrature over the noise."""
    candidates = Candidates.of(asked.public, protocol.candidates)
    assert candidates.tokens.shape[1] == 2, "computed only for two candidates"
    public = asked.public.double().gather(1, candidates.tokens).numpy()
    sums = subsample_aggregate.summed(asked, candidates).numpy() / subsample_aggregate.UNIT
    chances = zip(sums, public[:, 0] / public.sum(axis=1), strict=True)
    first = np.array([_first_fraction(own, chance, protocol.scale) for own, chance in chances])
    fractions = torch.from_numpy(np.stack([first, 1 - first], axis=1))
    return torch.zeros(asked.public.shape, dtype=torch.float64).scatter_(1, candidates.tokens, fractions)


def _first_fraction(sums: Reals, public: float, scale: float) -> float:
    """Returns the first candidate's fraction, from the sums [2] and its probability if no sum is positive."""
    middles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    noise = scale * np.where(middles < 0.5, np.log(2 * middles), -np.log(2 * (1 - middles)))
    first, second = np.maximum(sums[0] + noise, 0)[:, None], np.maximum(sums[1] + noise, 0)[None, :]
    total = first + second
    return float(np.where(total > 0, first / np.where(total > 0, total, 1.0), public).mean())
