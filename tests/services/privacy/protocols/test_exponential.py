"""Claim: the event of the exponential mechanism bounds the cost of every input (README, Theorems 2 and 3)."""

from fractions import Fraction
from itertools import combinations, permutations, product
from math import exp
from typing import Any

import numpy as np
import pytest
import torch

from privmix.privacy.accounting.bounded_range import bounded_range_rdp, sampled_rdp
from privmix.privacy.accounting.bounded_range import hockey_stick as hockey_stick_bound
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocols.exponential import (
    Exponential,
    FixedSizeExponentialEvent,
    radii,
)
from tests.services.privacy.mechanism import (
    Rows,
    climb,
    hockey_stick,
    log_softmax,
    released,
    renyi_divergence,
    token_distribution,
)
from tests.support.rows import PARTS, PUBLIC, part_logits, public_logits

pytestmark = pytest.mark.usefixtures("operators")

VOCABULARY = 3
SEARCHED = (1.5, 3.0, 18.0)
MODERATE = (1.5, 3.0, 5.0)
EPSILONS = np.array([0.0, 0.1, 0.5])
CASES = [(1, 1, 1.0), (2, 2, 0.6), (2, 1, 0.6), (3, 2, 0.4), (4, 1, 1.5), (4, 2, 0.8)]


def losses(protocol: Exponential, event: FixedSizeExponentialEvent, logits: Rows) -> list[float]:
    """Returns each divergence of the token under replacement of the last part, as a share of its bound."""
    public, *rows = log_softmax(logits)
    *others, before, after = rows
    pair = [token_distribution(protocol, public, np.array([*others, own])) for own in (before, after)]
    limits = hockey_stick_bound(EPSILONS, event.range, event.drawn)
    return [
        *(renyi_divergence(pair[0], pair[1], a) / rdp for a, rdp in zip(SEARCHED, event.rdp(SEARCHED), strict=True)),
        *(hockey_stick(pair[0], pair[1], e) / limit for e, limit in zip(EPSILONS, limits, strict=True) if limit > 0),
    ]


def search(protocol: Exponential, event: FixedSizeExponentialEvent, rounds: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    return climb(lambda x: max(losses(protocol, event, x)), (event.parts + 2, VOCABULARY), rounds, rng)[0]


@pytest.mark.parametrize(("parts", "sample", "radius"), CASES)
def test_no_input_loses_more_than_the_event(parts: int, sample: int, radius: float) -> None:
    protocol, event = Exponential(parts, sample, radius), FixedSizeExponentialEvent(parts, sample, radius)
    assert search(protocol, event, 100, parts) <= 1


@pytest.mark.parametrize(("parts", "radius"), [(3, 0.3), (5, 0.6), (5, 1.0)])
def test_with_every_part_drawn_some_input_loses_as_much(parts: int, radius: float) -> None:
    """The part predicts one of two tokens before, the other after. For larger radii the cost is an upper bound."""
    protocol, event = Exponential(parts, parts, radius), FixedSizeExponentialEvent(parts, parts, radius)
    assert event.adjacency == "user"
    predictions = np.array([[0.0, -40.0], [-40.0, 0.0]])
    laws = []
    for log_odds in np.linspace(-2 * radius - 3, 2 * radius + 3, 121):
        for lifted, own in product((0, parts // 2, parts - 1), (0, 1)):
            public = -np.logaddexp(0, [-log_odds, log_odds])
            rows = predictions[[*(0,) * lifted, *(1,) * (parts - 1 - lifted), own]]
            laws.append(token_distribution(protocol, public, rows))
    for order, bound in zip(MODERATE, event.rdp(MODERATE), strict=True):
        largest = max(renyi_divergence(p, q, order) for p, q in zip(laws[::2], laws[1::2], strict=True))
        assert 0.999 * bound <= largest <= bound


def test_no_input_exceeds_the_privacy_loss_distribution() -> None:
    event = FixedSizeExponentialEvent(3, 2, 0.7)
    composed = event.pld()
    bounds = hockey_stick_bound(EPSILONS, event.range, event.drawn)
    for epsilon, bound in zip(EPSILONS, bounds, strict=True):
        assert bound - 1e-12 <= composed.get_delta_for_epsilon(float(epsilon)) <= bound * (1 + 1e-3) + 1e-6


GRID = [0.01, 0.5, 3.0, 12.0]


@pytest.mark.parametrize("eta", GRID)
def test_the_cost_of_bounded_range_is_the_largest_moment(eta: float) -> None:
    """Compares with a plain search over s, which can only underestimate: the bound is never below, and close."""
    s = np.linspace(1e-9, eta * (1 - 1e-9), 20_001)
    low, high = np.exp(-s), np.exp(eta - s)
    mass = (1 - low) / (high - low)
    orders = (1.06, 2.0, 7.5, 100.0)
    for order, bound in zip(orders, bounded_range_rdp(orders, eta), strict=True):
        both = [np.logaddexp(np.log(mass) + b * (eta - s), np.log1p(-mass) - b * s).max() for b in (order, 1 - order)]
        largest = max(both) / (order - 1)
        assert largest * (1 - 1e-9) <= bound <= largest * (1 + 1e-6) + 1e-13
        assert bound <= order * eta**2 / 8 * (1 + 2e-4), "bounded range (Dong, Durfee, Rogers 2020)"


def integrated(eta: float, drawn: float, order: float) -> float:
    """Returns the bound of Theorem 3 from a quadrature over all z, each of the three terms at its own worst s."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    s, z = np.linspace(0, eta, 401)[1:-1, None], np.exp(eta * (nodes + 1) / 2)
    x = 1 + drawn * (z - 1)
    beta, dz = x / z, eta / 2 * weights * z
    low, high = np.exp(-s), np.exp(eta - s)
    mass = (1 - low) / (high - low)
    one_way, other_way = mass * np.maximum(0, high - z), (1 - mass) * np.maximum(0, 1 - z * low)
    forward, backward = x ** (order - 2), x ** (-order - 1)
    both = beta * (forward * one_way + backward * other_way)
    terms = [both, (1 - beta) * forward * one_way, (1 - beta) * backward * one_way]
    excess = order * (order - 1) * drawn**2 * sum(float((term @ dz).max()) for term in terms)
    return float(np.log1p(excess) / (order - 1))


@pytest.mark.parametrize(
    ("eta", "drawn", "order"), [(0.01, 0.5, 1.5), (0.5, 0.05, 1.5), (1.0, 0.3, 3.0), (1.0, 0.05, 8.0)]
)
def test_a_sampled_cost_has_every_term_of_the_theorem(eta: float, drawn: float, order: float) -> None:
    """Each interval is widened to its cell's, by 1/256: its variance grows by 1/128. Each term is 6 % or more."""
    exact = integrated(eta, drawn, order)
    assert exact <= sampled_rdp([order], eta, drawn)[0] <= 1.012 * exact


@pytest.mark.parametrize("drawn", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("half_range", [0.05, 0.5, 2.0])
def test_no_three_distributions_of_bounded_range_cost_more(half_range: float, drawn: float) -> None:
    """By convexity, in the worst case A, B and B' are proportional to a measure times e^0 or e^(eta/2)."""
    corners = np.exp(half_range * np.array([*product((0, 1), repeat=3)]))  # [8, 3]
    rng = np.random.default_rng(0)
    bounds = sampled_rdp(SEARCHED, 2 * half_range, drawn)

    def shares(measures: Rows) -> Rows:
        """Returns shares of the bound [n, orders] for measures [n, 8]."""
        laws = corners / (measures @ corners)[:, None]
        before, after = ((1 - drawn) * laws[:, :, 0] + drawn * laws[:, :, own] for own in (1, 2))
        moments = [np.log(np.sum(measures * after * (before / after) ** a, axis=1)) / (a - 1) for a in SEARCHED]
        return np.array(moments).T / bounds

    kept = rng.dirichlet(np.full(8, 0.15), size=4000)
    best = shares(kept)
    for step in np.geomspace(1, 0.01, 12):
        tried = kept * np.exp(step * rng.normal(size=kept.shape)) + 1e-300
        tried /= tried.sum(axis=1, keepdims=True)
        reached = shares(tried)
        assert reached.max() <= 1
        better = reached.max(axis=1) > best.max(axis=1)
        kept[better], best[better] = tried[better], reached[better]
    assert best.max() > (0.9 if half_range < 0.5 else 0.7), "the search comes close to the bound"


def test_the_dominating_pair_is_attained_at_every_epsilon() -> None:
    """With two of four equal parts drawn, no smaller pair dominates, so no better privacy loss distribution exists."""
    radius = 0.3
    protocol, event = Exponential(4, 2, radius), FixedSizeExponentialEvent(4, 2, radius)
    predictions = [np.array([0.0, -20.0]), np.array([-20.0, 0.0])]
    pairs = []
    for first in np.linspace(1 - np.exp(-radius), np.exp(-radius), 81):
        public = np.log([first, 1 - first])
        pairs.append(
            [token_distribution(protocol, public, np.array([predictions[1]] * 3 + [own])) for own in predictions]
        )
    for epsilon in (0.01, 0.05, 0.15):
        attained = max(hockey_stick(p, q, epsilon) for p, q in pairs)
        allowed = hockey_stick_bound(np.array([epsilon]), event.range, event.drawn)[0]
        assert 0.998 * allowed <= attained <= allowed


def spread(present: Any, absent: Any, kept: Any) -> Fraction:
    """Returns the largest ratio of integer weights divided by the smallest, exactly.

    Both are among the ratios that are extreme in float64, up to its rounding.
    """
    present, absent = present[kept], absent[kept]
    near = present.astype(np.float64) / absent.astype(np.float64)
    extreme = (near >= near.max() * (1 - 1e-14)) | (near <= near.min() * (1 + 1e-14))
    quotients = {Fraction(a, b) for a, b in zip(present[extreme], absent[extreme], strict=True)}
    return max(quotients) / min(quotients)


def answered(public: torch.Tensor, rows: torch.Tensor, models: list[tuple[int, ...]]) -> Any:
    together = rows[[i for drawn in models for i in drawn]].log_softmax(dim=1)
    return shape(public.log_softmax(dim=0).expand(len(models), -1), together, models)


@pytest.mark.parametrize("sample", [1, 3, 5])
@pytest.mark.parametrize("share", [0.001, 0.5, 1.0])
@pytest.mark.parametrize("kind", PUBLIC)
def test_integer_weights_keep_to_the_range(kind: str, share: float, sample: int) -> None:
    generator = torch.Generator().manual_seed(PUBLIC.index(kind))
    public = public_logits(kind, generator)
    rows = torch.stack([part_logits(part, public, generator) for part in PARTS])
    low, high = radii(sample)
    protocol = Exponential(len(PARTS), sample, low + share * (high - low))
    chosen = list(combinations(range(len(PARTS)), sample))[:20]
    others = [(*drawn[:-1], (drawn[-1] + 1) % len(PARTS)) for drawn in chosen]
    answers = answered(public, rows, [*chosen, *others])
    weights = protocol.distribution(answers).weights.numpy().astype(object)
    kept = answers.public[0].numpy() > 0
    for before, after in zip(weights[: len(chosen)], weights[len(chosen) :], strict=True):
        assert spread(before, after, kept) <= Fraction(exp(protocol.event.range))


def test_without_slack_rounding_leaves_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows the power of the test above: the same code with a clip at the radius itself fails it."""
    public = public_logits("at the floor", torch.Generator().manual_seed(3))
    rows = torch.where(torch.arange(len(public)) == torch.arange(5, 15)[:, None], 0.0, -60.0)
    protocol = Exponential(10, 1, 6.0)
    answers = answered(public, rows, [(part,) for part in range(10)])
    kept = answers.public[0].numpy() > 0

    def widest() -> Fraction:
        weights = protocol.distribution(answers).weights.numpy().astype(object)
        return max(spread(b, a, kept) for a, b in permutations(weights, 2))

    allowed = Fraction(exp(protocol.event.range))
    assert widest() <= allowed
    monkeypatch.setattr("privmix.privacy.protocols.exponential.slack", lambda *_: 0.0)
    assert widest() > allowed


def test_a_sequence_with_another_number_of_rows_is_refused() -> None:
    public, *rows = log_softmax(np.random.default_rng(0).normal(size=(4, 5)))
    with pytest.raises(ValueError, match="must name 2 parts"):
        released(Exponential(3, 2, 0.5), public, np.array(rows), [(0,), (0, 1, 2)])
