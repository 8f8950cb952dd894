"""Claim (privacy.md sections 7 and 9.1): no input costs the exponential mechanism more than its event says."""

from fractions import Fraction
from itertools import pairwise
from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from services.privacy import planning
from services.privacy.accounting import ORDERS
from services.privacy.channel import log_binomial
from services.privacy.events import from_json
from services.privacy.exponential import Exponential, ExponentialEvent, ExponentialSettings, radii, slack
from services.privacy.shaping import shape
from tests.services.privacy.mechanism import (
    Rows,
    climb,
    hockey_stick,
    log_softmax,
    released,
    renyi_divergence,
    subsets,
    token_distribution,
)
from tests.services.privacy.test_mixture import PARTS, PUBLIC, part_logits, public_logits

VOCABULARY = 3
SEARCHED = (1.5, 3.0, 18.0)
EPSILONS = (0.0, 0.1, 0.5)
CASES = [(1, 1.0, 1.0), (2, 1.0, 0.7), (2, 0.5, 2.0), (3, 0.5, 0.4), (3, 0.34, 1.5)]


def losses(protocol: Exponential, event: ExponentialEvent, logits: Rows, parts: int) -> list[float]:
    """Each Rényi divergence between the token's laws with and without the last part, over what the event allows."""
    public, *rows = log_softmax(logits)
    present = token_distribution(protocol, public, np.array(rows[:parts]))
    absent = token_distribution(protocol, public, np.array(rows[: parts - 1]))
    pairs = ((present, absent), (absent, present))
    allowed = event.rdp(SEARCHED)
    return [renyi_divergence(*pair, a) / rdp for a, rdp in zip(SEARCHED, allowed, strict=True) for pair in pairs]


def search(protocol: Exponential, event: ExponentialEvent, rounds: int, seed: int) -> float:
    parts = event.parts
    rng = np.random.default_rng(seed)
    return climb(lambda x: max(losses(protocol, event, x, parts)), (parts + 1, VOCABULARY), rounds, rng)[0]


@pytest.mark.parametrize(("parts", "q", "radius"), CASES)
def test_no_input_loses_more_than_the_event(parts: int, q: float, radius: float) -> None:
    assert search(Exponential(parts, q, radius), ExponentialEvent(parts, q, radius), 100, parts) <= 1


@pytest.mark.parametrize(("parts", "q", "radius"), CASES[:3])
def test_some_input_loses_as_much(parts: int, q: float, radius: float) -> None:
    assert 0.999 <= search(Exponential(parts, q, radius), ExponentialEvent(parts, q, radius), 600, 1) <= 1


def test_a_clip_at_twice_the_radius_is_caught() -> None:
    assert search(Exponential(2, 0.5, 1.0), ExponentialEvent(2, 0.5, 0.5), 100, 0) > 1.5


def test_no_input_passes_the_privacy_loss_distribution() -> None:
    """At every epsilon the composition's first step: one token's own hockey-stick divergence."""
    parts, q, radius = 2, 0.7, 1.0
    protocol = Exponential(parts, q, radius)
    composed = ExponentialEvent(parts, q, radius).pld()
    allowed = [composed.get_delta_for_epsilon(epsilon) for epsilon in EPSILONS]

    def share(logits: Rows) -> float:
        public, *rows = log_softmax(logits)
        p, q_ = (token_distribution(protocol, public, np.array(rows[:n])) for n in (parts, parts - 1))
        return max(
            max(hockey_stick(p, q_, epsilon), hockey_stick(q_, p, epsilon)) / limit
            for epsilon, limit in zip(EPSILONS, allowed, strict=True)
        )

    found, _ = climb(share, (parts + 1, VOCABULARY), 300, np.random.default_rng(0))
    assert 0.99 <= found <= 1


@pytest.mark.parametrize(("parts", "q", "radius"), CASES[1:4])
def test_no_replacement_loses_more_than_its_bound(parts: int, q: float, radius: float) -> None:
    protocol, allowed = Exponential(parts, q, radius), ExponentialEvent(parts, q, radius).user_rdp(SEARCHED)

    def share(logits: Rows) -> float:
        public, *rows = log_softmax(logits)
        first, second = (token_distribution(protocol, public, np.array([*rows[: parts - 1], row])) for row in rows[-2:])
        return max(renyi_divergence(first, second, a) / rdp for a, rdp in zip(SEARCHED, allowed, strict=True))

    assert climb(share, (parts + 2, VOCABULARY), 60, np.random.default_rng(parts))[0] <= 1


GRID = [(1, 1.0, 4.0), (2, 0.5, 0.01), (8, 0.25, 3.0), (80, 0.03, 5.0), (80, 1.0, 3.7), (1000, 0.01, 2.0)]


@pytest.mark.parametrize(("parts", "q", "radius"), GRID)
def test_the_bound_is_the_largest_moment(parts: int, q: float, radius: float) -> None:
    """Against a plain search over s, which can only understate: never below, and hardly above."""
    event = ExponentialEvent(parts, q, radius)
    s = np.linspace(1e-9, event.range * (1 - 1e-9), 20_001)
    low, high = np.exp(-s), np.exp(event.range - s)
    mass = (1 - low) / (high - low)
    for order, bound in zip((1.06, 2.0, 7.5, 100.0), event.rdp([1.06, 2.0, 7.5, 100.0]), strict=True):
        both = [
            np.logaddexp(
                np.log(mass) + b * np.log1p(q * np.expm1(event.range - s)),
                np.log1p(-mass) + b * np.log1p(q * np.expm1(-s)),
            ).max()
            for b in (order, 1 - order)
        ]
        largest = max(both) / (order - 1)
        assert largest * (1 - 1e-9) <= bound <= largest * (1 + 2e-4) + 1e-13


@pytest.mark.parametrize("radius", [0.01, 0.5, 3.0])
def test_without_subsampling_it_is_at_most_that_of_bounded_range(radius: float) -> None:
    event = ExponentialEvent(4, 1.0, radius)
    assert (event.rdp(ORDERS) <= ORDERS * event.range**2 / 8 * (1 + 2e-4)).all()


@pytest.mark.parametrize(("parts", "q", "radius"), GRID)
def test_subsampling_amplifies_at_least_as_theorem_c4_says(parts: int, q: float, radius: float) -> None:
    """Steinke 2022, with eps(k) = k eta^2 / 8."""
    event = ExponentialEvent(parts, q, radius)
    for order in (2, 3, 8, 32, 64):
        losses = [(k - 1) * k * event.range**2 / 8 for k in range(2, order + 1)]
        published = logsumexp(log_binomial(order, q) + np.array([0.0, 0.0, *losses])) / (order - 1)
        assert event.rdp([order])[0] <= published * (1 + 2e-4)


def test_the_token_is_drawn_from_the_formula() -> None:
    public, *rows = log_softmax(np.random.default_rng(0).normal(scale=2, size=(4, 50)))
    protocol = Exponential(3, 0.5, 1.2)
    models = [(), (1,), (0, 2), (0, 1, 2)]
    for asked, weights in zip(models, released(protocol, public, np.array(rows), models), strict=True):
        total = sum((np.clip(rows[i] - public, -1.2, 1.2) for i in asked), np.zeros(50))
        expected = np.exp(public + np.clip(total / 1.5, -1.2, 1.2))
        np.testing.assert_allclose((weights / weights.sum()).astype(float), expected / expected.sum(), rtol=1e-4)


def test_many_sequences_in_one_call_are_each_as_alone() -> None:
    public, *rows = log_softmax(np.random.default_rng(1).normal(scale=2, size=(6, 300)))
    protocol = Exponential(5, 0.5, 0.7)
    models = [*subsets(5), *subsets(5)]
    together = released(protocol, public, np.array(rows), models)
    for asked, weights in zip(models, together, strict=True):
        (alone,) = released(protocol, public, np.array(rows), [asked])
        np.testing.assert_allclose((weights / alone - 1).astype(float), 0, atol=1e-5)


def spread(present: Any, absent: Any, kept: Any) -> Fraction:
    """The largest quotient of integer weights over the smallest, exactly."""
    quotients = [Fraction(a, b) for a, b in zip(present[kept], absent[kept], strict=True)]
    return max(quotients) / min(quotients)


def answered(public: torch.Tensor, rows: torch.Tensor, models: list[tuple[int, ...]]) -> Any:
    together = rows[[i for asked in models for i in asked]].log_softmax(dim=1)
    return shape(public.log_softmax(dim=0).expand(len(models), -1), together, models)


@pytest.mark.parametrize("q", [0.2, 1.0])
@pytest.mark.parametrize("share", [0.001, 0.5, 1.0])
@pytest.mark.parametrize("kind", PUBLIC)
def test_integer_weights_keep_to_the_range(kind: str, share: float, q: float) -> None:
    generator = torch.Generator().manual_seed(PUBLIC.index(kind))
    public = public_logits(kind, generator)
    rows = torch.stack([part_logits(part, public, generator) for part in PARTS])
    low, high = radii(len(PARTS), q)
    protocol = Exponential(len(PARTS), q, low + share * (high - low))
    answers = answered(public, rows, [tuple(range(n)) for n in range(len(PARTS) + 1)])
    weights = protocol.release(answers).weights.numpy().astype(object)
    kept = answers.public[0].numpy() > 0
    for absent, present in pairwise(weights):
        assert spread(present, absent, kept) <= Fraction(exp(protocol.event.range))


def test_without_slack_rounding_leaves_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above can see: the same code, clipping at the radius itself."""
    generator = torch.Generator().manual_seed(3)
    public = public_logits("at the floor", generator)
    rows = torch.stack([part_logits(part, public, generator) for part in ("one-hot", "disjoint", "far")])
    protocol = Exponential(3, 1.0, 6.0)
    answers = answered(public, rows, [(), (0,), (0, 1), (0, 1, 2)])
    kept = answers.public[0].numpy() > 0

    def widest() -> Fraction:
        weights = protocol.release(answers).weights.numpy().astype(object)
        return max(spread(b, a, kept) for a, b in pairwise(weights))

    allowed = Fraction(exp(protocol.event.range))
    assert widest() <= allowed
    monkeypatch.setattr("services.privacy.exponential.slack", lambda *_: 0.0)
    assert widest() > allowed


@pytest.mark.parametrize(("parts", "q"), [(1, 1.0), (80, 0.03), (5000, 1.0)])
def test_little_of_a_radius_is_lost_to_rounding(parts: int, q: float) -> None:
    low, high = radii(parts, q)
    for radius in np.geomspace(low, high, 20):
        assert slack(parts, q, radius) <= 0.1 * radius * (1 + 1e-6)
    for radius in (low * 0.9, high * 1.1):
        with pytest.raises(ValueError, match="radius"):
            Exponential(parts, q, radius)


@pytest.mark.parametrize(("parts", "q", "tokens", "epsilon"), [(80, 0.03, 1024, 8.0), (8, 1.0, 256, 2.0)])
def test_a_plan_spends_its_budget(parts: int, q: float, tokens: int, epsilon: float) -> None:
    protocol = ExponentialSettings(q=q, tokens=tokens, epsilon=epsilon).plan(parts)
    spent = planning.cost(protocol.event, tokens, 1e-5)
    assert epsilon * (1 - 1e-6) <= spent.epsilon_rdp <= epsilon
    assert spent.user_epsilon_rdp is not None
    assert spent.epsilon_pld is not None
    assert epsilon < spent.user_epsilon_rdp < 3 * epsilon


def test_a_chosen_radius_is_kept() -> None:
    assert ExponentialSettings(q=0.5, radius=0.3).plan(8) == Exponential(8, 0.5, 0.3)


def test_the_event_survives_storage() -> None:
    event = ExponentialEvent(80, 0.03, 1.6)
    assert event.to_json() == '{"kind":"exponential","parts":80,"q":0.03,"radius":1.6}'
    assert from_json(event.to_json()) == event
    assert event.guarantee.status == "certified"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"parts": 0}, "parts"),
        ({"parts": 2.5}, "parts"),
        ({"parts": 10**7, "q": 1.0}, "parts"),
        ({"q": 0.0}, "q"),
        ({"q": 0.1}, "q"),
        ({"q": 1.1}, "q"),
        ({"radius": 0.0}, "radius"),
        ({"radius": np.inf}, "radius"),
        ({"radius": 40.0}, "radius"),
    ],
)
def test_impossible_settings_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Exponential(**{"parts": 8, "q": 0.25, "radius": 0.4, **fields})
