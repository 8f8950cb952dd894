"""Which alerts follow from what is seen: once for each crossing, and again only after it was undone."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.alerts.alert import Alert
from services.alerts.conditions import Conditions, Observation
from services.budget.statement import Statement
from services.gateway.status import Shard
from services.keys.records import Key, KeyAccount, Share, ShareAccount, Usage, now
from services.keys.traffic import Traffic, TrafficReport

THRESHOLDS = (0.5, 0.8)


def conditions(levels: dict[str, float] | None = None) -> Conditions:
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
        "epsilon_spent": 1.0,
        "epsilon_left": 7.0,
        "tokens_charged": charged,
        "tokens_left": left,
        "exhausted": left == 0,
        "stopped": False,
        "event": None,
    }
    return Statement(**values | changes)


def account(share: Share, usage: Usage, **fields: Any) -> KeyAccount:
    key = Key(id="key_1", name="lab", hint="pmx_abcd", created=now(), group=fields.pop("group", None))
    return KeyAccount(key=key, share=share, usage=usage, **fields)


def traffic(live: int, waiting: int, tokens: int) -> TrafficReport:
    return Traffic().report(waiting=waiting).model_copy(update={"live": live, "tokens": tokens})


def told(alerts: list[Alert]) -> list[tuple[str, str, float | None]]:
    return [(alert.event, alert.status, alert.threshold) for alert in alerts]


def budget(looker: Conditions, charged: int, left: int | None, **changes: Any) -> list[tuple[str, str, float | None]]:
    return told(looker.look(Observation(statement=statement(charged, left, **changes)), 0.0))


def test_each_threshold_of_the_budget_is_told_once() -> None:
    looker = conditions()
    assert budget(looker, 49, 51) == []
    assert budget(looker, 50, 50) == [("budget.threshold", "firing", 0.5)]
    assert budget(looker, 52, 48) == []
    assert budget(looker, 48, 52) == [], "an open lease gave some back"
    assert budget(looker, 50, 50) == []
    assert budget(looker, 100, 0) == [("budget.threshold", "firing", 0.8), ("budget.exhausted", "firing", 1.0)]
    assert budget(looker, 100, 0) == []


@given(st.lists(st.integers(0, 100), max_size=30))
def test_no_threshold_is_told_twice_while_the_budget_only_shrinks(steps: list[int]) -> None:
    looker = conditions()
    found = [each for charged in sorted(steps) for each in budget(looker, charged, 100 - charged)]
    highest = max(steps, default=0) / 100
    assert found == [
        ("budget.exhausted" if threshold == 1 else "budget.threshold", "firing", threshold)
        for threshold in (0.5, 0.8, 1.0)
        if threshold <= highest
    ]


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(0, 30))
def test_a_restart_tells_nothing_again(steps: list[int], at: int) -> None:
    whole, before = conditions(), conditions()
    expected = [each for charged in sorted(steps) for each in budget(whole, charged, 100 - charged)]
    found = [each for charged in sorted(steps)[:at] for each in budget(before, charged, 100 - charged)]
    after = conditions(dict(before.levels))
    assert (
        found + [each for charged in sorted(steps)[at:] for each in budget(after, charged, 100 - charged)] == expected
    )


def test_a_new_ledger_counts_from_the_beginning() -> None:
    looker = conditions()
    budget(looker, 100, 0)
    assert budget(looker, 0, 100) == []
    assert budget(looker, 80, 20) == [("budget.threshold", "firing", 0.5), ("budget.threshold", "firing", 0.8)]


def test_a_budget_of_measured_losses_is_told_only_when_it_stops() -> None:
    looker = conditions()
    measured: dict[str, Any] = {"enforced": "measured", "epsilon_spent": 3.0}
    assert budget(looker, 90, None, **measured) == []
    (alert,) = [
        each
        for each in looker.look(Observation(statement=statement(90, 0, stopped=True, **measured)), 0.0)
        if each.event == "budget.exhausted"
    ]
    assert alert.epsilon_spent is None, "clients may not know it"


def test_shares_of_keys_and_groups_by_what_is_spent() -> None:
    looker = conditions()
    held = account(Share(tokens=10), Usage(held=10))
    assert looker.look_at_shares([held]) == [], "what is held may come back"
    both = account(
        Share(tokens=10, tokens_per_day=4),
        Usage(spent=6, spent_today=4),
        group="ward",
        group_share=Share(tokens=7),
        group_usage=Usage(spent=6),
    )
    alerts = looker.look_at_shares([both, both])
    assert {(each.event, each.subject, each.limit, each.threshold) for each in alerts} == {
        ("share.threshold", "key lab", "tokens", 0.5),
        ("share.threshold", "key lab", "tokens_per_day", 0.5),
        ("share.threshold", "key lab", "tokens_per_day", 0.8),
        ("share.exhausted", "key lab", "tokens_per_day", 1.0),
        ("share.threshold", "group ward", "tokens", 0.5),
        ("share.threshold", "group ward", "tokens", 0.8),
    }
    assert looker.look_at_shares([both]) == []
    tomorrow = both.model_copy(update={"usage": Usage(spent=6, spent_today=0)})
    assert looker.look_at_shares([tomorrow]) == []
    assert [each.limit for each in looker.look_at_shares([both])] == ["tokens_per_day"] * 3


def test_what_is_wrong_is_told_when_it_lasts_and_when_it_is_over() -> None:
    looker = conditions()
    broken = Observation(troubles={"coordinator": "there is no such actor"})
    assert looker.look(broken, 100.0) == []
    assert looker.look(Observation(), 120.0) == [], "a restart that patience covers"
    assert looker.look(broken, 130.0) == []
    assert looker.look(broken, 189.0) == []
    (alert,) = looker.look(broken, 190.0)
    assert (alert.event, alert.status, alert.seconds) == ("service.unavailable", "firing", 60.0)
    assert alert.reasons == broken.troubles
    assert looker.look(broken, 300.0) == []
    (alert,) = conditions(dict(looker.levels)).look(Observation(), 330.0)
    assert (alert.event, alert.status, alert.seconds) == ("service.unavailable", "resolved", 200.0)


def test_waiting_without_a_token_is_a_stall_and_idleness_is_none() -> None:
    looker = conditions()
    assert looker.look(Observation(traffic=traffic(0, 0, 5)), 0.0) == []
    assert looker.look(Observation(traffic=traffic(0, 0, 5)), 100.0) == []
    assert looker.look(Observation(traffic=traffic(2, 1, 5)), 110.0) == []
    assert looker.look(Observation(), 120.0) == [], "what does not answer is no news"
    assert told(looker.look(Observation(traffic=traffic(2, 1, 5)), 170.0)) == [("service.stalled", "firing", None)]
    assert told(looker.look(Observation(traffic=traffic(2, 1, 6)), 180.0)) == [("service.stalled", "resolved", None)]


def test_parts_without_a_live_copy() -> None:
    looker = conditions()

    def shards(*answers: bool) -> Observation:
        parts = ((0, 1), (0, 1), (2, 3))
        return Observation(
            shards=[
                Shard(name=f"shard-{number}", parts=those, answers=answer, resident_bytes=None)
                for number, (those, answer) in enumerate(zip(parts, answers, strict=True))
            ]
        )

    for at in (0.0, 100.0):
        assert looker.look(shards(True, False, True), at) == [], "a copy serves them"
    assert looker.look(shards(True, True, False), 200.0) == []
    (alert,) = looker.look(shards(True, True, False), 260.0)
    assert (alert.event, alert.reasons) == ("parts.unserved", {"shard-2": "2 parts have no live copy"})
    assert told(looker.look(shards(True, True, True), 270.0)) == [("parts.unserved", "resolved", None)]


def test_ensembles_have_conditions_of_their_own_in_one_place() -> None:
    levels: dict[str, float] = {}
    clinic = conditions(levels)
    court = Conditions("court", "privmix", THRESHOLDS, 60.0, levels, prefix="court/")
    assert budget(clinic, 50, 50) == budget(court, 50, 50) == [("budget.threshold", "firing", 0.5)]
    (alert,) = court.look(Observation(statement=statement(80, 20)), 0.0)
    assert (alert.ensemble, alert.threshold) == ("court", 0.8)
    assert budget(clinic, 60, 40) == []
    again = Conditions("court", "privmix", THRESHOLDS, 60.0, levels, prefix="court/")
    assert budget(again, 80, 20) == []


def test_a_share_of_one_ensemble_is_told_with_its_name() -> None:
    of_court = ShareAccount(share=Share(tokens=10), usage=Usage(spent=5))
    held = account(Share(tokens=100), Usage(spent=5), ensembles={"court": of_court})
    (alert,) = conditions().look_at_shares([held])
    assert (alert.ensemble, alert.subject, alert.spent, alert.allowed) == ("court", "key lab", 5, 10)
    assert "key lab has of court is 50% spent" in alert.text
