"""Claim: a planned radius spends the whole budget and no more, and a planned cost equals the accounting's."""

import pytest

from privmix.privacy import accounting
from privmix.privacy.accounting import composition, planning
from privmix.privacy.events import Accountant
from privmix.privacy.protocols.pmixed import RatioEvent, radii


@pytest.mark.parametrize(
    ("parts", "q", "tokens", "epsilon"), [(80, 0.03, 1024, 8.0), (1, 1.0, 3, 0.5), (8, 0.25, 256, 2)]
)
def test_a_radius_for_a_ledger_without_a_counter_spends_its_budget_at_one_order(
    parts: int, q: float, tokens: int, epsilon: float
) -> None:
    bounds, kept = radii(1), Accountant(8.0)
    radius = planning.largest(lambda c: RatioEvent(parts, q, c), tokens, epsilon, 1e-5, bounds, kept=kept)
    spent = planning.cost(RatioEvent(parts, q, radius), tokens, 1e-5)
    assert spent.epsilon_rdp <= epsilon
    assert spent.epsilon_rdp == pytest.approx(epsilon, rel=1e-8)
    assert planning.cost(RatioEvent(parts, q, radius * (1 + 1e-6)), tokens, 1e-5).epsilon_rdp > epsilon


def test_a_plan_that_is_made_again_composes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> tuple[float, float | None]:
        radius = planning.largest(lambda c: RatioEvent(5, 0.75, c), 48, 8.0, 1e-5, radii(1))
        return radius, planning.cost(RatioEvent(5, 0.75, radius), 48, 1e-5).epsilon_pld

    def compose(*arguments: object) -> None:
        raise AssertionError("the plan composes again")

    first = plan()
    monkeypatch.setattr(composition, "pld", compose)
    assert plan() == first


def test_what_was_kept_is_not_what_another_number_of_payments_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits find a ledger that charges once for many tokens (`test_mutants`) by what its payments cost."""
    event = RatioEvent(8, 0.25, 0.4)
    kept, one = accounting.pld_epsilon({event: 100}, 1e-5), accounting.pld_epsilon({event: 1}, 1e-5)
    monkeypatch.setattr(composition, "paid", lambda event, count: min(count, 1))
    assert accounting.pld_epsilon({event: 100}, 1e-5) == one != kept


def test_a_large_budget_is_bounded_by_the_largest_radius() -> None:
    assert planning.largest(lambda c: RatioEvent(8, 0.25, c), 1, 1e6, 1e-5, radii(1)) == radii(1)[1]


def test_a_budget_too_small_for_any_radius_is_refused() -> None:
    with pytest.raises(ValueError, match="does not last for 1000000 tokens"):
        planning.largest(lambda c: RatioEvent(8, 1.0, c), 10**6, 1e-4, 1e-12, radii(1))


def test_a_planned_cost_equals_the_accountings() -> None:
    event = RatioEvent(8, 0.25, 0.4)
    cost = planning.cost(event, 100, 1e-5)
    best = accounting.epsilon(accounting.rdp({event: 100}), 1e-5)
    assert (cost.epsilon_rdp, cost.best_order) == (best.epsilon, best.order)
    assert cost.epsilon_pld == accounting.pld_epsilon({event: 100}, 1e-5)
    assert cost.epsilon_pld is not None
    assert cost.epsilon_pld < cost.epsilon_rdp
