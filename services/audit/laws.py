"""The exact law of one released token, and what it costs to see many of them."""

import math
from itertools import product

import numpy as np
import torch
from dp_accounting.pld import privacy_loss_distribution
from numpy.typing import NDArray
from scipy.optimize import bisect
from scipy.special import gammaln, xlogy
from scipy.stats import binom

from services.audit.worlds import Key, Pair, Reals, World, weights
from services.privacy.mollifiers.candidates import Candidates
from services.privacy.protocol import Answers, Protocol
from services.privacy.protocols.adapmixed import AdaPMixed, ScreenedRatioEvent
from services.privacy.protocols.exponential import Exponential
from services.privacy.protocols.gnmax import GNMax, votes
from services.privacy.protocols.pmixed import PMixed
from services.privacy.protocols.subsample_aggregate import UNIT, SubsampleAggregate, summed

# Standard deviations beyond which a Gaussian's mass is left out.
_FARTHEST = 12.0
# Quantiles of Laplace noise that stand for all of it.
_QUANTILES = 1500
# For how many tokens all counts are enumerated.
_MOST_COUNTED = 2048
# Draws that are less likely are left out.
_LEAST_CHANCE = 1e-16
# Where an epsilon is taken for infinite.
_LARGEST = 500.0


def token_law(protocol: Protocol, world: World) -> Reals:
    """float64 [V]: the chance of each token.

    Draws are enumerated by how many parts of each kind they have; what is released to them is the integer weights of
    the protocol itself. Where a release has noise, its law is computed: GNMax's by sums over discrete Gaussians,
    subsample-and-aggregate's, for two tokens, by quadrature. AdaPMixED's screening is taken to pass.

    Raises:
        ValueError: there is no such computation for this protocol.
    """
    match protocol:
        case GNMax():
            return _noisy_plurality(protocol, _all_asked(world))
        case SubsampleAggregate():
            return _noisy_shares(protocol, _all_asked(world))
        case AdaPMixed():
            return token_law(_without_screening(protocol), world)
    keys, chances = draws(protocol, world)
    released = weights(protocol, world, keys).numpy().astype(object)
    laws = (released / released.sum(axis=1, keepdims=True)).astype(np.float64)
    return np.asarray(chances @ laws / chances.sum(), dtype=np.float64)


def described_law(protocol: Protocol, world: World) -> Reals:
    """float64 [V]: the law of a token by the protocol's published formula, in float64 and without its code.

    What is released in integers differs by rounding alone (some 1e-4), less than an audit's tokens tell.
    """
    public, rows = np.exp(world.public), np.exp(world.rows)
    match protocol:
        case PMixed(radius=float(radius), mollifier="ratio") | AdaPMixed(radius=float(radius), mollifier="ratio"):
            moved = [_moved(public, row, radius, protocol.projection) for row in rows]

            def released(key: Key) -> Reals:
                return np.asarray(np.mean([moved[kind] for kind in key], axis=0) if key else public / public.sum())

        case Exponential(radius=radius):
            clipped = np.clip(world.rows - world.public, -radius, radius)

            def released(key: Key) -> Reals:
                weights = public * np.exp(np.mean(clipped[list(key)], axis=0))
                return np.asarray(weights / weights.sum())

        case _:
            return token_law(protocol, world)
    keys, chances = draws(protocol, world)
    return np.asarray(chances @ np.array([released(key) for key in keys]) / chances.sum())


def _moved(public: Reals, row: Reals, radius: float, by: str) -> Reals:
    """The part's distribution moved into the ball e^-c p0 <= r <= e^c p0."""
    public, row = public / public.sum(), row / row.sum()
    low, high = math.exp(-radius), math.exp(radius)
    ratios = row / public
    if by == "mix":
        room = [(high - 1) / (ratios.max() - 1), (1 - low) / (1 - ratios.min())] if ratios.max() > 1 else [1.0]
        return np.asarray(public + min(1.0, *room) * (row - public))
    scale = bisect(lambda log: float(public @ np.clip(np.exp(log) * ratios, low, high)) - 1, -100.0, 100.0, xtol=1e-13)
    return np.asarray(public * np.clip(math.exp(scale) * ratios, low, high))


def draws(protocol: Protocol, world: World) -> tuple[list[Key], Reals]:
    """The kinds of the parts that a token may ask, and the chance of each such draw, from the protocol's description.

    Independent of `Protocol.draw`, which is audited against it (`services.audit.draws`).
    """
    kinds = [kind for kind in world.parts if kind is not None]
    present = [kinds.count(kind) for kind in range(len(world.rows))]
    if isinstance(protocol, PMixed) and protocol.mollifier == "ratio":
        none = (1 - protocol.q) ** protocol.parts
        shares = (1 - none) * np.array(present) / protocol.parts
        keys: list[Key] = [(), *((kind,) for kind in range(len(present)))]
        return _likely(keys, np.array([none, *shares]))
    counts = list(product(*(range(number + 1) for number in present)))
    keys = [tuple(np.repeat(np.arange(len(present)), count).tolist()) for count in counts]
    match protocol:
        case Exponential(parts, sample):
            ways = [math.prod(map(math.comb, present, count)) if sum(count) == sample else 0 for count in counts]
            return _likely(keys, np.array(ways, dtype=np.float64) / math.comb(parts, sample))
        case PMixed(q=q):
            return _likely(keys, np.array([math.prod(map(float, binom.pmf(drawn, present, q))) for drawn in counts]))
        case _:
            return _likely(keys, np.array([float(list(count) == present) for count in counts]))


def _likely(keys: list[Key], chances: Reals) -> tuple[list[Key], Reals]:
    kept = chances > _LEAST_CHANCE
    return [key for key, likely in zip(keys, kept, strict=True) if likely], chances[kept]


def pair_laws(protocol: Protocol, pair: Pair) -> tuple[Reals, Reals]:
    """The laws of a token before and after the replacement."""
    return token_law(protocol, pair.before), token_law(protocol, pair.after)


def log_ratio(p: Reals, q: Reals) -> Reals:
    """log p / q of each token; 0 where neither can be."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(np.log(p) - np.log(q), nan=0.0, posinf=np.inf, neginf=-np.inf))


def renyi_divergence(p: Reals, q: Reals, order: float) -> float:
    """The larger of D_a(p||q) and D_a(q||p)."""
    kept = (p > 0) | (q > 0)
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p[kept]), np.log(q[kept])
        moments = [float(np.logaddexp.reduce(a * order + b * (1 - order))) for a, b in ((log_p, log_q), (log_q, log_p))]
    return max(0.0, *moments) / (order - 1)


def tokens_epsilon(p: Reals, q: Reals, tokens: int, delta: float, interval: float = 1e-5) -> float:
    """Epsilon at ``delta`` of independent tokens with the laws p and q: never overstated.

    How often each token comes says everything, and where there are two or three tokens, all counts are enumerated. Of
    more, the composed privacy loss distribution of just these laws, with losses rounded down to multiples of
    ``interval``.
    """
    p, q = _merged(p, q)
    if len(p) == 1:
        return 0.0
    if len(p) <= 3 and tokens <= _MOST_COUNTED:
        return _counted_epsilon(p, q, tokens, delta)
    composed = privacy_loss_distribution.from_two_probability_mass_functions(
        _mass_function(q), _mass_function(p), False, interval, symmetric=False
    ).self_compose(tokens)
    return float(composed.get_epsilon_for_delta(delta))


def _merged(p: Reals, q: Reals) -> tuple[Reals, Reals]:
    """Tokens of the same likelihood ratio are one: which of them it was tells nothing."""
    kept = (p > 0) | (q > 0)
    _, kinds = np.unique(np.round(log_ratio(p[kept], q[kept]), 12), return_inverse=True)
    merged = [np.bincount(kinds, law[kept]) for law in (p, q)]
    return merged[0] / merged[0].sum(), merged[1] / merged[1].sum()


def _counted_epsilon(p: Reals, q: Reals, tokens: int, delta: float) -> float:
    counts = np.indices((tokens + 1,) * (len(p) - 1)).reshape(len(p) - 1, -1)
    counts = np.vstack([counts, tokens - counts.sum(axis=0)])[:, counts.sum(axis=0) <= tokens]
    arrangements = gammaln(tokens + 1) - gammaln(counts + 1).sum(axis=0)
    log_p, log_q = (arrangements + xlogy(counts, law[:, None]).sum(axis=0) for law in (p, q))
    return max(_epsilon_of_masses(log_p, log_q, delta), _epsilon_of_masses(log_q, log_p, delta))


def _epsilon_of_masses(log_p: Reals, log_q: Reals, delta: float) -> float:
    """The smallest epsilon at which the hockey-stick divergence of P from Q is at most ``delta``."""
    log_p, log_q = log_p[np.isfinite(log_p)], log_q[np.isfinite(log_p)]

    def excess(epsilon: float) -> float:
        return float(-(np.exp(log_p) * np.expm1(np.minimum(0.0, epsilon + log_q - log_p))).sum()) - delta

    if excess(0.0) <= 0:
        return 0.0
    if excess(_LARGEST) > 0:
        return math.inf
    return float(bisect(excess, 0.0, _LARGEST, xtol=1e-9)) - 1e-9


def _mass_function(law: Reals) -> dict[int, float]:
    return {token: math.log(chance) for token, chance in enumerate((law / law.sum()).tolist()) if chance > 0}


def _all_asked(world: World) -> Answers:
    return world.answers([world.asked(range(len(world.parts)))])


def _without_screening(protocol: AdaPMixed) -> PMixed:
    match protocol.event:
        case ScreenedRatioEvent(parts, radius):
            return PMixed(parts, 1.0, radius, projection=protocol.projection)
        case _:
            raise ValueError("the law of AdaPMixED with the renyi mollifier is not computed")


def _noisy_plurality(protocol: GNMax, answers: Answers) -> Reals:
    """The chance of every candidate to have the largest noisy count, the first of those that tie."""
    candidates = Candidates.of(answers.public, protocol.candidates)
    (counts,) = votes(answers, candidates)
    reach = math.ceil(_FARTHEST * protocol.sigma)
    values = np.arange(-reach, reach + int(counts.max()) + 1)
    masses = np.exp(-((values - counts[:, None]) ** 2) / (2 * protocol.sigma**2))
    masses /= masses.sum(axis=1, keepdims=True)
    at_most = masses.cumsum(axis=1)
    below = at_most - masses
    wins = [
        float(np.sum(own * below[:index].prod(axis=0) * at_most[index + 1 :].prod(axis=0)))
        for index, own in enumerate(masses)
    ]
    return _scattered(np.array(wins), candidates, answers)


def _noisy_shares(protocol: SubsampleAggregate, answers: Answers) -> Reals:
    """The mean share of each of two candidates in what is left above 0."""
    candidates = Candidates.of(answers.public, protocol.candidates)
    if candidates.tokens.shape[1] != 2:
        raise ValueError("the law of subsample-and-aggregate is computed for two candidates")
    (sums,) = summed(answers, candidates).numpy() / UNIT
    middles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    noise = protocol.scale * np.where(middles < 0.5, np.log(2 * middles), -np.log(2 * (1 - middles)))
    first, second = np.maximum(sums[0] + noise, 0)[:, None], np.maximum(sums[1] + noise, 0)[None, :]
    total = first + second
    public = answers.public.double().gather(1, candidates.tokens)[0].numpy()
    share = float(np.where(total > 0, first / np.where(total > 0, total, 1.0), public[0] / public.sum()).mean())
    return _scattered(np.array([share, 1 - share]), candidates, answers)


def _scattered(chances: Reals, candidates: Candidates, answers: Answers) -> NDArray[np.float64]:
    law = torch.zeros(answers.public.shape[1], dtype=torch.float64)
    return np.asarray(law.scatter_(0, candidates.tokens[0], torch.from_numpy(chances)).numpy())
