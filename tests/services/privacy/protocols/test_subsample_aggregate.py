"""Claim: subsample-and-aggregate's event bounds the cost of all sums, and some sums attain it."""

import math

import numpy as np
import pytest
import torch

from privmix.privacy.accounting import ORDERS
from privmix.privacy.mollifiers.candidates import Candidates
from privmix.privacy.mollifiers.shaping import SamplingOptions, shape
from privmix.privacy.protocols.subsample_aggregate import (
    UNIT,
    SubsampleAggregate,
    SubsampleAggregateEvent,
    summed,
)
from privmix.privacy.sampling.categorical import TOTAL, sample
from tests.services.privacy.mechanism import Rows, climb, hockey_stick, renyi_divergence

SEARCHED = (1.5, 3.0, 18.0)


def noise(centre: int, t: float, reach: int) -> Rows:
    masses = np.exp(-np.abs(np.arange(-reach, reach + 1) - centre) / t)
    return np.asarray(masses / masses.sum())


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> int:
    """A grid coarse enough to enumerate every outcome."""
    monkeypatch.setattr("privmix.privacy.protocols.subsample_aggregate.UNIT", 8)
    return 8


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_the_cost_of_two_coordinates_is_exact(scale: float, coarse: int) -> None:
    t = scale * coarse
    reach = math.ceil(30 * t) + 2 * coarse
    present, absent = noise(coarse, t, reach), noise(0, t, reach)
    for order, rdp in zip(SEARCHED, SubsampleAggregateEvent(3, scale).rdp(SEARCHED), strict=True):
        both = renyi_divergence(present, absent, order) + renyi_divergence(absent, present, order)
        assert both == pytest.approx(rdp, rel=1e-9)


@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_no_replacement_costs_more_than_one_coordinate_up_and_one_down(scale: float, coarse: int) -> None:
    """Checks every split of the increases; a vector's divergence is the sum of its coordinates' divergences."""
    t = scale * coarse
    reach = math.ceil(30 * t) + 2 * coarse
    event = SubsampleAggregateEvent(3, scale)
    for order, rdp in zip(SEARCHED, event.rdp(SEARCHED), strict=True):
        origin = noise(0, t, reach)
        single = [renyi_divergence(noise(d, t, reach), origin, order) for d in range(coarse + 1)]
        assert (np.diff(single, 2) > -1e-12).all(), "convex in the shift"
        for first in range(coarse + 1):
            for second in range(coarse + 1 - first):
                assert single[first] + single[second] + single[coarse - first - second] <= rdp / 2 * (1 + 1e-9)
            assert single[first] + single[coarse - first] + single[coarse] <= rdp * (1 + 1e-9)


def token_law(weights: Rows, t: float) -> Rows:
    """Returns the exact distribution of a token from two candidates; the first is the fallback for empty sums."""
    reach = math.ceil(12 * t) + 3 * UNIT_OF_LAW
    values = np.maximum(np.arange(-reach, reach + 1), 0)
    joint = np.outer(*(noise(round(weight), t, reach) for weight in weights))
    with np.errstate(invalid="ignore"):
        first = np.where(np.add.outer(values, values) == 0, 1.0, values[:, None] / np.add.outer(values, values))
    chance = float((joint * first).sum())
    return np.array([chance, 1 - chance])


UNIT_OF_LAW = 8


def test_no_distributions_cost_more_than_the_event(coarse: int) -> None:
    scale = 0.4
    event = SubsampleAggregateEvent(2, scale)
    allowed, composed = event.rdp(SEARCHED), event.pld()

    def share(logits: Rows) -> float:
        chances = 1 / (1 + np.exp(-logits))
        other, before, after = np.floor(np.stack([chances, 1 - chances], axis=1) * coarse)
        present, absent = (token_law(other + own, scale * coarse) for own in (before, after))
        shares = [hockey_stick(present, absent, e) / composed.get_delta_for_epsilon(e) for e in (0.0, 0.5, 1.0)]
        shares += [
            renyi_divergence(*pair, a) / rdp
            for a, rdp in zip(SEARCHED, allowed, strict=True)
            for pair in ((present, absent), (absent, present))
        ]
        return max(shares)

    largest, _ = climb(share, (3,), 60, np.random.default_rng(0))
    assert 0.2 < largest <= 1


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0, 1e3])
def test_the_cost_on_the_fine_grid(scale: float) -> None:
    """The cost is close to continuous Laplace noise (Mironov 2017, Proposition 6), and below pure DP's."""
    shift = 1 / scale
    rdp = SubsampleAggregateEvent(3, scale).rdp(ORDERS)
    towards = ORDERS / (2 * ORDERS - 1)
    continuous = np.logaddexp(np.log(towards) + (ORDERS - 1) * shift, np.log1p(-towards) - ORDERS * shift)
    np.testing.assert_allclose(rdp, 2 * continuous / (ORDERS - 1), rtol=2e-5)
    assert (rdp > 0).all()
    assert (rdp <= 2 * shift).all()


def test_a_tiny_cost_keeps_its_digits() -> None:
    """With much noise, the divergence is a / scale^2 at any magnitude."""
    orders = ORDERS[ORDERS < 300]
    np.testing.assert_allclose(SubsampleAggregateEvent(3, 1e6).rdp(orders), orders / 1e12, rtol=3e-6)


def test_rows_are_summed_on_the_grid_and_no_row_counts_for_more_than_one() -> None:
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(6, 500, generator=generator).mul(2).log_softmax(1)
    rows = torch.randn(24, 500, generator=generator).mul(4).log_softmax(1)
    rows[3], rows[7] = math.nan, public[1] * 40
    answers = shape(public, rows, [(0, 1, 2, 3)] * 6)
    for count in (1, 40, 1000):
        candidates = Candidates.of(answers.public, count)
        together = summed(answers, candidates)
        for s in range(6):
            own = shape(public[s : s + 1], rows[4 * s : 4 * s + 4], [(0, 1, 2, 3)])
            assert summed(own, Candidates.of(own.public, count))[0].tolist() == together[s].tolist()
            for r in range(4):
                alone = shape(public[s : s + 1], rows[4 * s + r][None], [(0,)])
                (row,) = summed(alone, Candidates.of(alone.public, count))
                assert int(row.min()) >= 0
                assert int(row.sum()) <= UNIT
                expected = (alone.ratios * alone.public)[0, candidates.tokens[s]] * UNIT
                assert float((row - expected).abs().max()) <= 1 + 1e-6 * UNIT


def test_only_kept_candidates_are_released() -> None:
    public = torch.randn(50, 80, generator=torch.Generator().manual_seed(1)).log_softmax(1)
    answers = shape(public, torch.randn(50, 80).log_softmax(1), [(0,)] * 50, SamplingOptions(top_k=5))
    for protocol in (SubsampleAggregate(1, 3.0, candidates=4), SubsampleAggregate(1, 3.0, candidates=20)):
        weights = protocol.distribution(answers).weights
        assert int((weights > 0).sum(dim=1).max()) <= 5
        assert not bool(weights[answers.public == 0].any())
        assert int(weights.sum(dim=1).min()) > 0
        assert int(weights.sum(dim=1).max()) < TOTAL


@pytest.mark.exact
def test_the_public_model_answers_for_an_empty_sum() -> None:
    public = torch.tensor([[0.6, 0.4]]).log().expand(4000, 2)
    answers = shape(public, torch.tensor([[-30.0, 0.0]]).log_softmax(1).expand(4000, 2), [(0,)] * 4000)
    weights = SubsampleAggregate(1, 50.0, candidates=1).distribution(answers).weights
    empty = weights[:, 1] > 0
    assert 0.3 < float(empty.float().mean()) < 0.7, "half of the noise is negative"
    assert torch.equal(weights[empty].double() / 2.0**61, answers.public[empty].double())
    assert set(sample(weights[empty])) == {0, 1}
