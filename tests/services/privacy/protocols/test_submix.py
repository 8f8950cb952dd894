"""Claim: SubMix releases and charges the same as a literal transcription of its algorithm."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.optimize import bisect

from privmix.privacy import accounting
from privmix.privacy.accounting import published
from privmix.privacy.events import Accountant
from privmix.privacy.mollifiers.agreement import largest_weights
from privmix.privacy.mollifiers.shaping import SamplingOptions, shape
from privmix.privacy.protocol import Answers
from privmix.privacy.protocols.submix import (
    SubMix,
    SubMixSettings,
    partition_to_user,
    random_stopping,
)
from tests.services.privacy.mechanism import Rows, laws, literally, log_softmax, renyi_divergence

KINDS = ("near", "far", "one-hot", "twins", "one-sided")
CASES = [(3, 2.0, 0.01), (5, 4.0, 0.003), (2, 18.0, 0.5), (8, 1.5, 1e-4), (1, 4.0, 0.02), (4, 3.0, 50.0)]


def halves(kind: str, public: Rows, rng: np.random.Generator) -> Rows:
    """Returns log-probabilities of one part's two models [2, V]."""
    first, second = rng.normal(size=(2, len(public)))
    match kind:
        case "near":
            return log_softmax(np.array([public + 0.1 * first, public + 0.1 * second]))
        case "far":
            return log_softmax(4 * np.array([first, second]))
        case "one-hot":
            return np.where(np.arange(len(public)) == int(public.argmin()), 0.0, -40.0) + np.zeros((2, 1))
        case "twins":
            return log_softmax(3 * np.array([first, first]))
        case _:
            return log_softmax(np.array([public, 4 * first]))


def query(parts: int, vocabulary: int, seed: int, top_k: int | None = None) -> Answers:
    rng = np.random.default_rng(seed)
    public = log_softmax(rng.normal(scale=2, size=vocabulary))
    rows = np.concatenate([halves(KINDS[(i + seed) % len(KINDS)], public, rng) for i in range(parts)])
    models = [tuple(range(2 * parts))]
    return shape(torch.tensor(public[None]).float(), torch.tensor(rows).float(), models, SamplingOptions(top_k=top_k))


def literal_share(h: Rows, other: Rows, p0: Rows, order: float, beta: float) -> float:
    """Finds by bisection the largest lambda for which the two mixtures are within beta."""

    def excess(share: float) -> float:
        with np.errstate(divide="ignore", over="ignore"):
            mixed = share * h + (1 - share) * p0, share * other + (1 - share) * p0
            return min(renyi_divergence(*mixed, order) - beta, 1e6)

    return 1.0 if excess(1.0) <= 0 else float(bisect(excess, 0, 1, xtol=1e-15, rtol=1e-14))


def distributions(answers: Answers) -> tuple[Rows, Rows]:
    """Returns the distributions that the service computes with: the models' [N, 2, V] and the public model's [V]."""
    p0 = answers.public[0].double().numpy()
    p0 = p0 / p0.sum()
    h = answers.ratios.double().numpy() * p0
    return (h / h.sum(axis=1, keepdims=True)).reshape(-1, 2, len(p0)), p0


def served_shares(answers: Answers, order: float, beta: float) -> Rows:
    return largest_weights(answers.ratios.view(-1, 2, answers.ratios.shape[1]), answers.public[0], order, beta)


@pytest.mark.parametrize(("parts", "order", "beta"), CASES)
def test_lambda_is_the_largest_within_beta(parts: int, order: float, beta: float) -> None:
    for seed in range(4):
        answers = query(parts, 60, seed)
        h, p0 = distributions(answers)
        expected = [literal_share(pair[0], pair[1], p0, order, beta) for pair in h]
        np.testing.assert_allclose(served_shares(answers, order, beta), expected, rtol=2e-4)


@pytest.mark.parametrize(("parts", "order", "beta"), CASES)
def test_every_part_is_charged_by_the_algorithm(parts: int, order: float, beta: float) -> None:
    protocol = SubMix(parts, order, beta)
    for seed in range(4):
        answers = query(parts, 60, seed, top_k=50)
        h, p0 = distributions(answers)
        released, charged = literally(h, p0, served_shares(answers, order, beta), order)
        release = protocol.distribution(answers)
        np.testing.assert_allclose(laws(release)[0], released, rtol=1e-9, atol=1e-18)
        assert release.losses is not None
        np.testing.assert_allclose(release.losses, [charged], rtol=1e-9, atol=1e-13)


def test_a_token_possible_only_with_one_part_costs_an_infinite_loss() -> None:
    """At lambda 1, the token has probability 0 without the part."""
    p0, own, other = [0.4, 0.3, 0.3], [0.5, 0.2, 0.3], [0.6, 0.4, 0.0]
    with np.errstate(divide="ignore"):
        rows = torch.tensor(np.log([own, own, other, other])).float()
    release = SubMix(2, 4.0, 0.1).distribution(shape(torch.tensor([p0]).log(), rows, [(0, 1, 2, 3)]))
    assert release.losses is not None
    assert np.isfinite(release.losses).tolist() == [[False, True]]


def test_the_conversions_of_the_appendix() -> None:
    assert random_stopping(0.5, 1000) == pytest.approx(0.5 + math.log(1000))
    assert partition_to_user(4.0, 0.3) == pytest.approx((2.0, 2.5 * 0.3))
    assert partition_to_user(10.0, 0.3) == pytest.approx((5.0, 17 / 8 * 0.3))
    with pytest.raises(ValueError, match="order"):
        partition_to_user(2.0, 0.3)


@pytest.mark.parametrize("tokens", [1, 2, 3, 50])
def test_an_end_that_a_part_causes_costs_what_random_stopping_states(tokens: int) -> None:
    """Without the part, the output would go on to its drawn end, or to a later one of the data."""

    def lengths(end: int) -> list[Fraction]:
        """The law of the number of answers, where the data would end the output after `end` of them."""
        return [Fraction(sum(min(draw, end) == length for draw in range(tokens)), tokens) for length in range(tokens)]

    largest = max(
        with_part / without
        for end in range(tokens)
        for later in range(end, tokens + 1)
        for with_part, without in zip(lengths(end), lengths(later), strict=True)
        if with_part
    )
    assert math.log(largest) == pytest.approx(random_stopping(0.0, tokens)), "and a part may reach it"


def test_the_plan_keeps_to_the_budget() -> None:
    settings = SubMixSettings(tokens=1000, epsilon=4.0, random_stopping=10.0)
    protocol = settings.plan(20, Accountant(4.0))
    total = 1000 * protocol.beta
    assert 3.999 <= accounting.epsilon(np.array([total]), settings.delta, [4.0]).epsilon <= 4
    assert (settings.enforced, settings.when_exhausted) == ("measured", "public")
    assert SubMixSettings(beta=0.125).plan(20).beta == 0.125
    details = settings.details(protocol)
    assert details["part_budget"] == published.total_loss(4.0, 4.0, settings.delta)
    assert details["user"]["loss"] == pytest.approx(2.5 * details["part_budget"])
    assert settings.stop_within == 10_000
    assert details["fixed_length"]["loss"] == pytest.approx(details["part_budget"] + math.log(10_000))
    assert details["user"]["epsilon"] > 4
    assert "user" not in SubMixSettings(order=2.0, epsilon=16).details(protocol)
