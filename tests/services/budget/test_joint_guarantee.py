"""Claim: the promises of several ensembles to a person who is in all of them add up."""

from typing import Any

import pytest

from privmix.budget.joint_guarantee import joint_guarantee
from privmix.budget.statement import Statement


def stated(epsilon: float | None, delta: float, **changes: Any) -> Statement:
    values: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "order": 8.0,
        "adjacency": "user",
        "enforced": "bound",
        "stop_within": None,
        "note": "-",
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
    joint = joint_guarantee({"clinic": stated(0.1, 1e-5), "court": stated(0.2, 1e-6), "school": stated(4.0, 2e-6)})
    assert (joint.epsilon, joint.delta) == (4.3, 1.3e-5)
    assert "clinic, court and school add up: epsilon 4.3 and delta 1.3e-05" in joint.guarantee
    assert "retired" in joint.guarantee


def test_a_cohort_counts_once_with_its_largest_promise() -> None:
    statements = {"ward": stated(1.0, 2e-6), "court": stated(0.5, 1e-6), "surgery": stated(3.0, 1e-6)}
    joint = joint_guarantee(statements, {"ward": "health", "surgery": "health", "court": None})
    assert (joint.epsilon, joint.delta) == (3.5, 3e-6)
    assert "one of ward and surgery and court add up" in joint.guarantee
    alone = joint_guarantee(
        {name: statements[name] for name in ("ward", "surgery")}, {"ward": "health", "surgery": "health"}
    )
    assert (alone.epsilon, alone.delta) == (3.0, 2e-6)
    assert "do not add up, because nobody is in two of them" in alone.guarantee


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (stated(None, 1e-5), "one of them promises no epsilon"),
        (stated(1.0, 1e-5, adjacency="part, as published"), "different neighbouring corpora"),
    ],
)
def test_promises_without_a_sum_are_reported_as_such(other: Statement, why: str) -> None:
    joint = joint_guarantee({"clinic": stated(0.1, 1e-5), "court": other})
    assert (joint.epsilon, joint.delta) == (None, None)
    assert why in joint.guarantee
    assert "no promise" in joint.guarantee
