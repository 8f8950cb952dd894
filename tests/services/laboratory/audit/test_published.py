"""Claim: of each published claim, the worst known pair costs what it costs by a computation of another kind."""

import math

import pytest

from privmix.laboratory.audit import published
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings


def as_published(parts: int, q: float, tokens: int) -> PMixed:
    return PMixedSettings(mollifier="renyi", q=q, tokens=tokens, epsilon=8.0).plan(parts)


QUERIED = ((0.03, 4.85), (0.1, 9.71))
"""q and epsilon where a draw has one of many sizes."""


@pytest.mark.parametrize(
    ("parts", "q", "epsilon"),
    [(8, 1.0, 11.27), (80, 1.0, 8.78), *(pytest.param(80, *row, marks=pytest.mark.slow) for row in QUERIED)],
)
def test_the_counterexample_costs_what_each_draw_of_the_published_mechanism_allows(
    parts: int, q: float, epsilon: float
) -> None:
    """Source: a computation without our mollifier, in which each draw size has a ball of its own."""
    assert published.against(as_published(parts, q, 1024), 1024, 1e-5) == pytest.approx(epsilon, abs=0.006)


def test_the_published_claim_is_exceeded_and_the_certified_one_is_not() -> None:
    theirs, ours = published.of_pmixed(8, 1.0, 8.0, 1e-5, 64)
    assert theirs.worst > theirs.stated
    assert ours.worst <= ours.stated


@pytest.mark.parametrize(("parts", "stated", "worst"), [(8, 1467.526, 125.981), (80, 113.7205, 8.0229)])
def test_adapmixed_measures_too_much_on_one_text_and_nothing_on_its_neighbour(
    parts: int, stated: float, worst: float
) -> None:
    """Source: bisection for the ball of a token with two values, and binomial counts of it."""
    with_part, without = published.of_adapmixed(parts, 1e-5, 1024)
    assert [with_part.stated, with_part.worst] == pytest.approx([stated, worst], rel=1e-4)
    assert without.worst == with_part.worst
    assert without.stated < 0.5 < without.worst


@pytest.mark.parametrize("parts", [2, 80])
def test_submix_states_little_more_than_its_answers_cost_and_nothing_that_bounds_what_follows_stop(parts: int) -> None:
    answers, all_seen = published.of_submix(parts, 1e-5, 1024)
    # The pairs with D_2 = 2 of a token with two values, of which the rare one has probability b or sqrt((e^2 - 1) b).
    least = max(math.log((math.sqrt((math.e**2 - 1) * b) - 1e-5) / b) for b in [2.0**-place for place in range(6, 36)])
    assert answers.worst == pytest.approx(least, abs=1e-3)
    assert least < answers.stated == pytest.approx(2 + math.log(1e5))
    assert all_seen.row()["worst"] == "unbounded"


def test_the_certified_mollifier_has_no_published_claim() -> None:
    with pytest.raises(ValueError, match="renyi"):
        published.against(PMixed(2, 1.0, 0.5), 10, 1e-5)
