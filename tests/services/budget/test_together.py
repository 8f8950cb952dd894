"""What several ensembles promise together to a person who is in all of them."""

from typing import Any

import pytest

from services.budget.statement import Statement
from services.budget.together import together


def stated(epsilon: float | None, delta: float, **changes: Any) -> Statement:
    values: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "order": 8.0,
        "adjacency": "user",
        "enforced": "bound",
        "stop_within": None,
        "guarantee": "-",
        "epsilon_spent": 0.0,
        "epsilon_left": epsilon,
        "tokens_charged": 0,
        "tokens_left": 1,
        "exhausted": False,
        "stopped": False,
        "event": None,
    }
    return Statement(**values | changes)


def test_epsilons_and_deltas_add_up_exactly() -> None:
    found = together({"clinic": stated(0.1, 1e-5), "court": stated(0.2, 1e-6), "school": stated(4.0, 2e-6)})
    assert (found.epsilon, found.delta) == (4.3, 1.3e-5)
    assert "clinic, court and school add up: epsilon 4.3 and delta 1.3e-05" in found.guarantee
    assert "retired" in found.guarantee


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (stated(None, 1e-5), "one of them promises no epsilon"),
        (stated(1.0, 1e-5, adjacency="part, as published"), "different neighbouring corpora"),
    ],
)
def test_what_has_no_sum_is_said_so(other: Statement, why: str) -> None:
    found = together({"clinic": stated(0.1, 1e-5), "court": other})
    assert (found.epsilon, found.delta) == (None, None)
    assert why in found.guarantee
    assert "no promise" in found.guarantee
