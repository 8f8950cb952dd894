"""Claim: for all votes, the cost of GNMax is at most its event's cost and the votes' own loss."""

import math
from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest
import torch
from scipy.special import erfc

from privmix.privacy.arrays import Integers
from privmix.privacy.events import Accountant
from privmix.privacy.mollifiers.candidates import Candidates
from privmix.privacy.mollifiers.shaping import SamplingOptions, shape
from privmix.privacy.protocol import Answers
from privmix.privacy.protocols import gnmax
from privmix.privacy.protocols.gnmax import (
    GNMax,
    GNMaxEvent,
    GNMaxSettings,
    largest_chances,
    loss,
    votes,
)
from privmix.privacy.sampling.categorical import TOTAL, sample
from tests.services.privacy.mechanism import hockey_stick, renyi_divergence
from tests.support.worst_cases import wins

ORDERS = (1.5, 3.0, 18.0)


def neighbours(counts: Integers) -> list[Integers]:
    """Returns the votes after one part votes for another token."""
    unit = np.eye(len(counts), dtype=np.int64)
    steps = [unit[i] - unit[j] for i, j in permutations(range(len(counts)), 2)]
    return [counts + step for step in steps if (counts + step).min() >= 0]


ALL_VOTES = [np.array(counts) for counts in product((0, 1, 2, 4, 9, 14), repeat=3)]


@pytest.mark.parametrize("sigma", [0.7, 1.0, 2.5])
def test_no_votes_lose_more_than_the_event_or_their_own_loss(sigma: float) -> None:
    allowed = dict(zip(ORDERS, GNMaxEvent(3, sigma).rdp(ORDERS), strict=True))
    below, largest = 0, 0.0
    for counts in ALL_VOTES:
        present = wins(counts, sigma)
        own = {a: loss(counts[None], sigma, a)[0] for a in ORDERS}
        below += own[3.0] < allowed[3.0] / 2
        for neighbour in neighbours(counts):
            absent = wins(neighbour, sigma)
            for order in ORDERS:
                for pair in ((present, absent), (absent, present)):
                    lost = renyi_divergence(*pair, order)
                    largest = max(largest, lost / allowed[order])
                    assert lost <= own[order] + 1e-12
    assert 0.4 < largest <= 1, "if two tokens lead by far, their difference reveals half as much as the counts"
    assert below > len(ALL_VOTES) / 10, "for clear majorities, the theorem gives a smaller loss than the event"


def test_no_votes_exceed_the_privacy_loss_distribution() -> None:
    composed = GNMaxEvent(3, 1.0).pld()
    for epsilon in (0.0, 0.3, 1.0):
        allowed = composed.get_delta_for_epsilon(epsilon)
        lost = [hockey_stick(wins(c, 1.0), wins(n, 1.0), epsilon) for c in ALL_VOTES for n in neighbours(c)]
        assert max(lost) <= allowed * (1 + 1e-12)


@pytest.mark.parametrize("sigma", [3.0, 20.0])
def test_the_loss_agrees_with_the_theorem_as_published(sigma: float) -> None:
    """Compares with a transcription of Theorem 6 at the same mu1 and mu2, for margins smaller by 2."""
    order, count = 4.0, 100
    z = np.arange(-250, 251)
    noise = np.exp(-(z**2) / (2 * sigma**2))
    difference = np.convolve(noise, noise) / noise.sum() ** 2
    for first in (55, 70, 85, 100):
        q = sum(float(difference[500 + margin :].sum()) for margin in (2 * first - count - 2, first - 2))
        mu2 = sigma * math.sqrt(math.log(1 / q))
        mu1 = max(order, mu2 + 1)
        eps1, eps2 = mu1 / sigma**2, mu2 / sigma**2
        expected = order / sigma**2
        limit = math.exp((mu2 - 1) * eps2) / (mu1 / (mu1 - 1) * mu2 / max(mu2 - 1, 1e-9)) ** mu2
        if mu2 > 1 and q <= limit:
            a = (1 - q) / (1 - (q * math.exp(eps2)) ** ((mu2 - 1) / mu2))
            b = math.exp(eps1) / q ** (1 / (mu1 - 1))
            dependent = math.log((1 - q) * a ** (order - 1) + q * b ** (order - 1)) / (order - 1)
            expected = min(expected, dependent)
        computed = loss(np.array([[first, count - first, 0]]), sigma, order)[0]
        assert computed == pytest.approx(expected, rel=1e-6, abs=1e-14)


def answers_of(counts: Integers, copies: int = 1) -> Answers:
    """Returns answers in which token i is the most likely one of ``counts[i]`` parts."""
    vocabulary = len(counts)
    rows = torch.full((int(counts.sum()), vocabulary), -5.0)
    rows[torch.arange(len(rows)), torch.repeat_interleave(torch.arange(vocabulary), torch.tensor(counts))] = 5.0
    public = -0.01 * torch.arange(vocabulary).float()
    models = [tuple(range(len(rows)))] * copies
    return shape(public.log_softmax(0).expand(copies, -1), rows.log_softmax(1).repeat(copies, 1), models)


def test_the_released_token_follows_the_exact_wins() -> None:
    counts = np.array([4, 3, 1])
    release = GNMax(8, 1.5, 3, 4.0).distribution(answers_of(counts, 5000))
    assert set(release.weights.unique().tolist()) == {0, TOTAL // 2}
    tokens = Counter(sample(release.weights))
    for token, chance in enumerate(wins(counts, 1.5)):
        assert abs(tokens[token] - 5000 * chance) <= 6 * math.sqrt(5000 * chance * (1 - chance))
    assert release.losses is not None
    assert release.losses.shape == (5000, 1)
    assert (release.losses == loss(counts[None], 1.5, 4.0)).all()


def test_votes_of_sequences_do_not_affect_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(5, 200, generator=generator).mul(3).log_softmax(1)
    rows = torch.randn(5 * 7, 200, generator=generator).mul(3).log_softmax(1)
    models = [tuple(range(7))] * 5
    answers = shape(public, rows, models)
    together = votes(answers, Candidates.of(answers.public, 20))
    for s in range(5):
        alone = shape(public[s : s + 1], rows[7 * s : 7 * s + 7], models[:1])
        candidates = Candidates.of(alone.public, 20)
        assert votes(alone, candidates)[0].tolist() == together[s].tolist()
        among = rows[7 * s : 7 * s + 7, candidates.tokens[0]].argmax(dim=1).bincount(minlength=20)
        assert among.tolist() == together[s].tolist()


def test_only_kept_tokens_are_released() -> None:
    """Uses noise much larger than the votes, and fewer kept tokens than candidates."""
    public = torch.randn(400, 50, generator=torch.Generator().manual_seed(1)).log_softmax(1)
    rows = torch.randn(400, 50).log_softmax(1)
    answers = shape(public, rows, [(0,)] * 400, SamplingOptions(top_k=3))
    tokens = torch.tensor(sample(GNMax(1, 100.0, 10).distribution(answers).weights))
    assert bool((answers.public[torch.arange(400), tokens] > 0).all())


@pytest.mark.parametrize("sigma", [0.7, 2.5])
def test_probabilities_of_winning_are_bounded(sigma: float) -> None:
    for counts in ALL_VOTES:
        chances, bounds = wins(counts, sigma), largest_chances(counts[None], np.ones((1, len(counts)), bool), sigma)[0]
        assert (chances <= bounds + 1e-12).all()
    counts = np.array([[40, 10, 0]])
    expected = [0.5 * erfc(-30.5 / 2 / 10), 0.5 * erfc(29.5 / 2 / 10), 0.5 * erfc(39.5 / 2 / 10)]
    np.testing.assert_allclose(largest_chances(counts, np.ones((1, 3), bool), 10.0)[0], expected, rtol=2e-3)


def test_a_token_shares_its_chance_with_all_that_have_as_many_votes() -> None:
    """Source: the bound 1 / #{z: n_z >= n_x} of SubMix (Ginart et al. 2022, appendix B.4)."""
    counts, kept = np.zeros((1, 100), dtype=np.int64), np.ones((1, 100), bool)
    counts[0, :4] = 2
    chances = largest_chances(counts, kept, 300.0)[0]
    np.testing.assert_allclose(chances, [1 / 4] * 4 + [1 / 100] * 96, rtol=0.02)


def test_tokens_that_are_not_kept_take_no_chance_from_a_kept_one() -> None:
    kept = np.array([[True, False, False], [True, True, False]])
    chances = largest_chances(np.array([[1, 0, 0], [1, 1, 0]]), kept, 5.0)
    assert chances[0, 0] == 1
    assert 0.5 <= chances[1, 0] <= 0.6


def test_probabilities_of_tokens_are_bounded_above() -> None:
    counts = np.array([30, 25, 2])
    answers, protocol = answers_of(counts, 2), GNMax(57, 8.0, 3)
    tokens = torch.tensor([0, 1])
    exact = math.exp(-float(np.log(wins(counts, 8.0)[tokens]).mean()))
    bounds, losses = protocol.chance_bounds(answers, tokens)
    np.testing.assert_array_equal(losses, protocol.distribution(answers).losses)
    assert 0.9 * exact <= math.exp(-np.log(bounds).mean()) <= exact
    assert GNMax(57, 8.0, 2).chance_bounds(answers, torch.tensor([0, 2]))[0][1] == 0


def test_the_order_of_losses() -> None:
    assert GNMaxSettings(sigma=20.0).plan(8, Accountant(6.5)).order == 6.5
    assert GNMaxSettings(sigma=20.0, order=5).plan(8).order == 5
    assert GNMaxSettings(sigma=20.0, order=5).plan(8, Accountant(5.0)) == GNMax(8, 20.0, 100, 5)
    with pytest.raises(ValueError, match="order must be the ledger's"):
        GNMaxSettings(sigma=20.0, order=5).plan(8, Accountant(6.0))


def test_what_is_kept_between_tokens_does_not_depend_on_votes() -> None:
    """The time of a token would tell the largest margin so far."""
    gnmax._tail.cache_clear()
    for first in range(64):
        counts = np.array([[first, 64 - first] + [0] * 98])
        gnmax.loss(counts, 17.0, 8.0)
        gnmax.largest_chances(counts, np.ones(counts.shape, bool), 17.0)
    assert gnmax._tail.cache_info().misses == 1
