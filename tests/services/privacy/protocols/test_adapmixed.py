"""Claim: AdaPMixED follows its Algorithm 1, charges what a transcription charges, and its losses keep to the bound."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from privmix.privacy import accounting
from privmix.privacy.events import Accountant
from privmix.privacy.mollifiers.mixture import slack
from privmix.privacy.mollifiers.projection import Projection, clip, mix
from privmix.privacy.mollifiers.renyi import mollify
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Answers
from privmix.privacy.protocols.adapmixed import (
    AdaPMixed,
    AdaPMixedSettings,
    ScreenedRatioEvent,
    ScreenedRenyiEvent,
    screening_divergence,
)
from privmix.privacy.protocols.pmixed import PMixed, RatioEvent
from privmix.privacy.sampling import noise
from tests.services.privacy.mechanism import Rows, climb, laws, literally, log_softmax, random_rows, renyi_divergence

ORDERS = (1.5, 3.0, 18.0)
NEVER, ALWAYS = 1e9, 0.0  # thresholds


def answers(public: Rows, parts: Rows, sequences: int = 1) -> Answers:
    """Returns the answers of all parts to ``sequences`` copies of one query."""
    return shape(
        torch.tensor(np.tile(public, (sequences, 1))).float(),
        torch.tensor(np.tile(parts, (sequences, 1))).float(),
        [tuple(range(len(parts)))] * sequences,
    )


def literal_loss(members: Rows, p0: Rows, order: float) -> float:
    """Computes Algorithm 1's loss of an answered query: SubMix's largest, of parts of one model and lambda 1."""
    shares = np.ones(len(members))
    members = members / members.sum(axis=1, keepdims=True)
    return max(literally(np.stack([members, members], axis=1), p0 / p0.sum(), shares, order)[1])


def screening_cost(protocol: AdaPMixed) -> float:
    return protocol.order * (protocol.mix / (protocol.parts * protocol.sigma)) ** 2


@pytest.mark.parametrize("projection", ["clip", "mix"])
@pytest.mark.parametrize(("parts", "radius", "order"), [(1, 0.8, 18.0), (2, 2.0, 3.0), (7, 0.5, 18.0), (40, 1.0, 2.5)])
def test_the_ratio_mollifier_has_the_cost_of_the_algorithm(
    parts: int, radius: float, order: float, projection: Projection
) -> None:
    protocol = AdaPMixed(parts, projection=projection, radius=radius, order=order, threshold=NEVER)
    every = PMixed(parts, 1.0, radius, projection=projection)
    project = clip if projection == "clip" else mix
    for seed, scale in product(range(2), (0.02, 2, 20)):
        query = answers(*random_rows(parts, 80, seed, scale))
        release = protocol.distribution(query)
        torch.testing.assert_close(
            release.weights / 2.0**61, every.distribution(query).weights / 2.0**61, rtol=1e-4, atol=0
        )
        members = project(query.ratios, query.public[0], radius - slack(parts, radius)).double().numpy()
        p0 = query.public[0].double().numpy()
        expected = literal_loss(members, p0, order) + screening_cost(protocol)
        assert release.losses is not None
        np.testing.assert_allclose(release.losses, [[expected]], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(("parts", "order", "beta"), [(1, 3.0, 0.1), (5, 18.0, 0.2), (12, 2.0, 0.01)])
def test_the_renyi_mollifier_has_the_cost_of_the_algorithm(parts: int, order: float, beta: float) -> None:
    protocol = AdaPMixed(parts, "renyi", beta=beta, order=order, threshold=NEVER, enforce="measured")
    for seed in range(3):
        query = answers(*random_rows(parts, 80, seed))
        p0 = query.public[0].double().numpy()
        members = mollify(query.ratios, query.public[0], order, beta * order).double().numpy()
        release = protocol.distribution(query)
        np.testing.assert_allclose(laws(release)[0], members.mean(axis=0) / members.mean(axis=0).sum(), rtol=1e-5)
        expected = literal_loss(members, p0, order) + screening_cost(protocol)
        assert release.losses is not None
        np.testing.assert_allclose(release.losses, [[expected]], rtol=1e-9, atol=1e-14)


@pytest.mark.exact
def test_a_screened_query_is_answered_by_the_public_model_and_costs_the_screening() -> None:
    protocol = AdaPMixed(3, radius=1.0, threshold=ALWAYS)
    query = answers(*random_rows(3, 200), sequences=3)
    release = protocol.distribution(query)
    assert torch.equal(release.weights.double() / 2.0**61, query.public.double())
    assert release.losses is not None
    np.testing.assert_allclose(release.losses, screening_cost(protocol), rtol=1e-12)


def screened_distributions(public: Rows, parts: Rows, protocol: AdaPMixed) -> tuple[Rows, Rows]:
    """Returns p0 and the noiseless mean of the screening, each [k], most likely tokens of p0 first."""
    top = np.argsort(-public, kind="stable")[: protocol.top_k]
    p0 = np.exp(public)
    mean = np.exp(parts).mean(axis=0) if len(parts) else p0
    return p0[top], protocol.mix * mean[top]


def screening_law(public: Rows, parts: Rows, protocol: AdaPMixed, bins: int = 61) -> Rows:
    """Returns the probabilities of an answer by the parts and by p0, with binned noise.

    A bin's decision is the decision at its center. The bins are the same with and without a part, so binning is
    post-processing.
    """
    p0, mean = screened_distributions(public, parts, protocol)
    edges = np.linspace(-6, 6, bins + 1) * protocol.sigma
    masses = [np.diff(norm.cdf(np.r_[-np.inf, edges[1:-1], np.inf], loc=m, scale=protocol.sigma)) for m in mean]
    middles = (edges[1:] + edges[:-1]) / 2
    grid = np.meshgrid(*[middles] * len(p0), indexing="ij")
    noisy = np.stack(grid, axis=-1).reshape(-1, len(p0)) + (1 - protocol.mix) * p0
    chances = masses[0]
    for mass in masses[1:]:
        chances = np.multiply.outer(chances, mass)
    decided = screening_divergence(noisy, np.tile(p0, (len(noisy), 1)), protocol.screening_order) <= protocol.threshold
    answered = float(chances.ravel()[decided].sum())
    return np.array([answered, 1 - answered])


def law(public: Rows, parts: Rows, protocol: AdaPMixed) -> Rows:
    """Returns the joint distribution of (decision, token)."""
    chances = screening_law(public, parts, protocol)
    forced = AdaPMixed(protocol.parts, projection=protocol.projection, radius=protocol.radius, threshold=NEVER)
    mean, p0 = (laws(forced.distribution(answers(public, given)))[0] for given in (parts, parts[:0]))
    return np.concatenate([chances[0] * mean, chances[1] * p0])


def shares_of_the_bound(protocol: AdaPMixed, event: ScreenedRatioEvent, logits: Rows) -> list[float]:
    rows = log_softmax(logits)
    present, absent = law(rows[0], rows[1:], protocol), law(rows[0], rows[1:-1], protocol)
    return [
        renyi_divergence(p, q, order) / bound
        for p, q in ((present, absent), (absent, present))
        for order, bound in zip(ORDERS, event.rdp(ORDERS), strict=True)
    ]


@pytest.mark.parametrize(("sigma", "mix", "threshold"), [(0.3, 1.0, 0.15), (0.2, 0.5, 0.5)])
@pytest.mark.parametrize(("parts", "radius"), [(1, 0.5), (2, 0.3), (3, 1.0)])
def test_no_input_loses_more_than_the_bound(
    parts: int, radius: float, sigma: float, mix: float, threshold: float
) -> None:
    protocol = AdaPMixed(parts, radius=radius, screening_order=2.0, sigma=sigma, mix=mix, threshold=threshold, top_k=2)
    assert isinstance(protocol.event, ScreenedRatioEvent)
    event, rng = protocol.event, np.random.default_rng(parts)
    largest, _ = climb(lambda x: max(shares_of_the_bound(protocol, event, x)), (parts + 1, 3), 80, rng)
    assert 0.2 < largest <= 1


def test_the_screening_has_noise_for_what_rounding_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part moves the mean by sqrt(2) / N if its row sums to 1, and rounding moves each of k entries by a step."""
    drawn = list[tuple[NDArray[np.int64], float]]()

    def noiseless(steps: NDArray[np.int64], scale: float) -> NDArray[np.int64]:
        drawn.append((steps, scale))
        return steps

    monkeypatch.setattr(noise, "discrete_gaussian", noiseless)
    protocol, query = AdaPMixed(2, radius=1.0), answers(*random_rows(2, 80))
    protocol.distribution(replace(query, ratios=8 * query.ratios))
    ((steps, scale),) = drawn
    step = 2.0**-44
    assert steps.sum() <= protocol.mix / step + steps.shape[1] / 2
    apart = math.sqrt(2) * protocol.mix / 2
    assert scale * step / protocol.sigma >= 1 + math.sqrt(steps.shape[1]) * step / apart


def test_the_screening_without_its_cost_is_caught() -> None:
    """Shows the search's power: with most of the loss in the screening, it exceeds the bound of the answer alone."""
    protocol = AdaPMixed(2, radius=0.01, screening_order=2.0, sigma=0.3, mix=1.0, threshold=0.15, top_k=2)
    event = ScreenedRatioEvent(2, 0.01, 1.0, 1e-9)
    rng = np.random.default_rng(0)
    largest, _ = climb(lambda x: max(shares_of_the_bound(protocol, event, x)), (3, 3), 60, rng)
    assert largest > 2


def test_queries_are_screened_with_the_exact_probability() -> None:
    public, parts = random_rows(2, 3, seed=5)
    protocol = AdaPMixed(2, radius=1.0, screening_order=2.0, sigma=0.3, mix=1.0, threshold=0.2, top_k=2)
    chance, _ = screening_law(public, parts, protocol, bins=401)
    trials = 4000
    losses = protocol.distribution(answers(public, parts, trials)).losses
    assert losses is not None
    answered = int((losses[:, 0] > screening_cost(protocol) * (1 + 1e-9)).sum())
    assert 0.2 < chance < 0.8
    assert abs(answered - trials * chance) <= 5 * math.sqrt(trials * chance * (1 - chance)) + trials * 2e-3


def test_the_cost_of_a_token() -> None:
    ratio = AdaPMixed(8, radius=0.4)
    assert ratio.event == ScreenedRatioEvent(8, 0.4, 1e-2, 1e-4)
    alone, screening = RatioEvent(8, 1.0, 0.4), np.array(ORDERS) * (1e-4 / (8 * 1e-2)) ** 2
    np.testing.assert_allclose(ratio.event.rdp(ORDERS), alone.rdp(ORDERS) + screening, rtol=1e-12)
    assert ratio.guarantee.status == "certified"
    measured = AdaPMixed(8, radius=0.4, enforce="measured").guarantee
    assert (measured.status, measured.adjacency) == ("data-dependent", "part, as published")
    renyi = AdaPMixed(8, "renyi", beta=0.2, enforce="measured")
    assert renyi.event == ScreenedRenyiEvent(8, 18.0, 0.2, 1e-2, 1e-4)
    assert np.isinf(renyi.event.rdp(ORDERS)).all()
    assert renyi.guarantee.status == "data-dependent"


def test_the_plan_keeps_to_the_budget() -> None:
    settings = AdaPMixedSettings(tokens=300, epsilon=4.0)
    protocol = settings.plan(20)
    order = [protocol.order]
    spent = accounting.epsilon(accounting.rdp({protocol.event: 300}, order), settings.delta, order).epsilon
    assert 0.999 * 4 <= spent <= 4
    assert settings.plan(20, Accountant(3.5)).order == 3.5
    assert settings.enforced == protocol.enforce == "bound"
    renyi = AdaPMixedSettings(mollifier="renyi")
    assert renyi.enforced == renyi.plan(20).enforce == "measured"
    assert AdaPMixedSettings(enforce="measured").plan(20, Accountant(18)).guarantee.status == "data-dependent"
