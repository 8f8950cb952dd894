"""Claim: the counterexample to the published proof costs more than the claim."""

import pytest

from privmix.laboratory.audit import published
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings


def as_published(parts: int, q: float, tokens: int) -> PMixed:
    return PMixedSettings(mollifier="renyi", q=q, tokens=tokens, epsilon=8.0).plan(parts)


@pytest.mark.parametrize(
    ("parts", "q", "epsilon"),
    [(8, 1.0, 11.27), (80, 1.0, 8.78), (80, 0.03, 4.85), pytest.param(80, 0.1, 9.71, marks=pytest.mark.slow)],
)
def test_the_counterexample_costs_what_each_draw_of_the_published_mechanism_allows(
    parts: int, q: float, epsilon: float
) -> None:
    """Source: a computation without our mollifier, in which each draw size has a ball of its own."""
    assert published.against(as_published(parts, q, 1024), 1024, 1e-5).epsilon == pytest.approx(epsilon, abs=0.006)


def test_the_published_claim_is_exceeded_and_the_certified_one_is_not() -> None:
    cost = published.compare(8, 1.0, 8.0, 1e-5, 64)
    assert cost.reached > cost.claimed
    assert cost.token_reached > 10 * cost.token_claimed
    assert cost.certified_reached <= cost.certified_claimed


def test_the_certified_mollifier_has_no_published_claim() -> None:
    with pytest.raises(ValueError, match="renyi"):
        published.against(PMixed(2, 1.0, 0.5), 10, 1e-5)
