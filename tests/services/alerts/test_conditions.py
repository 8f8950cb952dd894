"""Claim: an alert fires once when a condition begins, and again only after the condition ended."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from privmix.alerts.alert import Alert
from privmix.alerts.conditions import Conditions, EnsembleState
from privmix.budget.statement import Statement
from privmix.database.clock import now
from privmix.keys.records import Key, KeyAccount, Share, ShareUsage
from privmix.keys.traffic import Traffic, TrafficReport
from privmix.requests.status import ShardReport

THRESHOLDS = (0.5, 0.8)


def new_conditions(levels: dict[str, float] | None = None) -> Conditions:
    return Conditions("clinic", "privmix", THRESHOLDS, 60.0, {} if levels is None else levels)


def statement(charged: int, left: int | None, **changes: Any) -> Statement:
    values: dict[str, Any] = {
        "epsilon": 8.0,
        "delta": 1e-5,
        "order": 8.0,
        "adjacency": "user",
        "enforced": "bound",
        "stop_within": None,
        "guarantee": "-",
        "note": "-",
        "epsilon_spent": 1.0,
        "epsilon_left": 7.0,
        "tokens_charged": charged,
        "tokens_left": left,
        "exhausted": left == 0,
        "stopped": False,
        "event": None,
    }
    return Statement(**values | changes)


def account(share: Share, usage: ShareUsage, **fields: Any) -> KeyAccount:
    key = Key(id="key_1", name="lab", hint="pmx_abcd", created=now(), group=fields.pop("group", None))
    return KeyAccount(key=key, share=share, usage=usage, **fields)


def traffic(live: int, waiting: int, tokens: int) -> TrafficReport:
    return Traffic().report(waiting=waiting).model_copy(update={"live": live, "tokens": tokens})


def events(alerts: list[Alert]) -> list[tuple[str, str, float | None]]:
    return [(alert.event, alert.status, alert.threshold) for alert in alerts]


def budget(
    conditions: Conditions, charged: int, left: int | None, **changes: Any
) -> list[tuple[str, str, float | None]]:
    return events(conditions.evaluate(EnsembleState(statement=statement(charged, left, **changes)), 0.0))


def test_each_threshold_of_the_budget_fires_once() -> None:
    conditions = new_conditions()
    assert budget(conditions, 49, 51) == []
    assert budget(conditions, 50, 50) == [("budget.threshold", "firing", 0.5)]
    assert budget(conditions, 52, 48) == []
    assert budget(conditions, 48, 52) == [], "an open lease returned tokens"
    assert budget(conditions, 50, 50) == []
    assert budget(conditions, 100, 0) == [("budget.threshold", "firing", 0.8), ("budget.exhausted", "firing", 1.0)]
    assert budget(conditions, 100, 0) == []


@given(st.lists(st.integers(0, 100), max_size=30))
def test_no_threshold_fires_twice_while_the_budget_only_shrinks(steps: list[int]) -> None:
    conditions = new_conditions()
    fired = [event for charged in sorted(steps) for event in budget(conditions, charged, 100 - charged)]
    highest = max(steps, default=0) / 100
    assert fired == [
        ("budget.exhausted" if threshold == 1 else "budget.threshold", "firing", threshold)
        for threshold in (0.5, 0.8, 1.0)
        if threshold <= highest
    ]


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(0, 30))
def test_a_restart_repeats_no_alert(steps: list[int], at: int) -> None:
    def fired(conditions: Conditions, steps: list[int]) -> list[tuple[str, str, float | None]]:
        return [event for charged in steps for event in budget(conditions, charged, 100 - charged)]

    steps = sorted(steps)
    before = new_conditions()
    events_before = fired(before, steps[:at])
    after = new_conditions(dict(before.levels))
    assert events_before + fired(after, steps[at:]) == fired(new_conditions(), steps)


def test_a_new_ledger_counts_from_the_beginning() -> None:
    conditions = new_conditions()
    budget(conditions, 100, 0)
    assert budget(conditions, 0, 100) == []
    assert budget(conditions, 80, 20) == [("budget.threshold", "firing", 0.5), ("budget.threshold", "firing", 0.8)]


def test_a_budget_of_measured_losses_fires_only_when_it_stops() -> None:
    conditions = new_conditions()
    measured: dict[str, Any] = {"enforced": "measured", "epsilon_spent": 3.0}
    assert budget(conditions, 90, None, **measured) == []
    (alert,) = [
        alert
        for alert in conditions.evaluate(EnsembleState(statement=statement(90, 0, stopped=True, **measured)), 0.0)
        if alert.event == "budget.exhausted"
    ]
    assert alert.epsilon_spent is None, "it depends on private text"


def test_only_spent_tokens_of_keys_and_groups_count() -> None:
    conditions = new_conditions()
    held = account(Share(tokens=10), ShareUsage(held=10))
    assert conditions.evaluate_shares([held]) == [], "held tokens may be returned"
    both = account(
        Share(tokens=10, tokens_per_day=4),
        ShareUsage(spent=6, spent_today=4),
        group="ward",
        group_share=Share(tokens=7),
        group_usage=ShareUsage(spent=6),
    )
    alerts = conditions.evaluate_shares([both, both])
    assert {(alert.event, alert.subject, alert.limit, alert.threshold) for alert in alerts} == {
        ("share.threshold", "key lab", "tokens", 0.5),
        ("share.threshold", "key lab", "tokens_per_day", 0.5),
        ("share.threshold", "key lab", "tokens_per_day", 0.8),
        ("share.exhausted", "key lab", "tokens_per_day", 1.0),
        ("share.threshold", "group ward", "tokens", 0.5),
        ("share.threshold", "group ward", "tokens", 0.8),
    }
    assert conditions.evaluate_shares([both]) == []
    tomorrow = both.model_copy(update={"usage": ShareUsage(spent=6, spent_today=0)})
    assert conditions.evaluate_shares([tomorrow]) == []
    assert [alert.limit for alert in conditions.evaluate_shares([both])] == ["tokens_per_day"] * 3


def test_a_problem_fires_when_it_lasts_and_resolves_when_it_ends() -> None:
    conditions = new_conditions()
    broken = EnsembleState(troubles={"coordinator": "there is no such actor"})
    assert conditions.evaluate(broken, 100.0) == []
    assert conditions.evaluate(EnsembleState(), 120.0) == [], "the problem was shorter than the patience"
    assert conditions.evaluate(broken, 130.0) == []
    assert conditions.evaluate(broken, 189.0) == []
    (alert,) = conditions.evaluate(broken, 190.0)
    assert (alert.event, alert.status, alert.seconds) == ("service.unavailable", "firing", 60.0)
    assert alert.reasons == broken.troubles
    assert conditions.evaluate(broken, 300.0) == []
    (alert,) = new_conditions(dict(conditions.levels)).evaluate(EnsembleState(), 330.0)
    assert (alert.event, alert.status, alert.seconds) == ("service.unavailable", "resolved", 200.0)


def test_waiting_without_a_token_is_a_stall_and_idleness_is_not() -> None:
    conditions = new_conditions()
    assert conditions.evaluate(EnsembleState(traffic=traffic(0, 0, 5)), 0.0) == []
    assert conditions.evaluate(EnsembleState(traffic=traffic(0, 0, 5)), 100.0) == []
    assert conditions.evaluate(EnsembleState(traffic=traffic(2, 1, 5)), 110.0) == []
    assert conditions.evaluate(EnsembleState(), 120.0) == [], "a missing observation does not resolve a problem"
    assert events(conditions.evaluate(EnsembleState(traffic=traffic(2, 1, 5)), 170.0)) == [
        ("service.stalled", "firing", None)
    ]
    assert events(conditions.evaluate(EnsembleState(traffic=traffic(2, 1, 6)), 180.0)) == [
        ("service.stalled", "resolved", None)
    ]


def test_parts_without_a_live_copy_fire() -> None:
    conditions = new_conditions()

    def shards(*answers: bool) -> EnsembleState:
        parts = ((0, 1), (0, 1), (2, 3))
        return EnsembleState(
            shards=[
                ShardReport(name=f"shard-{number}", parts=shard_parts, answers=answer, resident_bytes=None)
                for number, (shard_parts, answer) in enumerate(zip(parts, answers, strict=True))
            ]
        )

    for at in (0.0, 100.0):
        assert conditions.evaluate(shards(True, False, True), at) == [], "a copy serves the parts"
    assert conditions.evaluate(shards(True, True, False), 200.0) == []
    (alert,) = conditions.evaluate(shards(True, True, False), 260.0)
    assert (alert.event, alert.reasons) == ("parts.unserved", {"shard-2": "2 parts have no live copy"})
    assert events(conditions.evaluate(shards(True, True, True), 270.0)) == [("parts.unserved", "resolved", None)]
