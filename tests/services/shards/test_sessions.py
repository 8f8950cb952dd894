"""Claim: a shard knows each context from what changed, and says so where it does not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privmix.coordinator.copies import ShardCopies, Told
from privmix.coordinator.group import Group
from privmix.coordinator.step import Step
from privmix.engine.engine import PUBLIC, ZERO, Request
from privmix.fleet.shard_map import PartGroup
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.pmixed import PMixed
from privmix.privacy.protocols.public import Public
from privmix.shards import sessions as shards
from privmix.shards.sessions import Asked, LostSessionError, Sessions, StepKey

MODELS = {4: "four", 5: "five", 6: "six"}
"""Of the second of two groups."""
PROTOCOL = Exponential(8, 2, 1.0)
GROUP = Group(PartGroup(1, MODELS, ()), PROTOCOL, ShardCopies((), dict[str, Any]().__getitem__, 1.0))
PLAIN, COLD = SamplingOptions(), SamplingOptions(temperature=0.5)


def step(*contexts: tuple[int, ...], options: SamplingOptions = PLAIN, draw: tuple[int, ...] = (5, 7)) -> Step:
    """A private sequence, and others that the public model alone answers."""
    names = tuple("abc"[: len(contexts)])
    salts = tuple(f"salt of {name}" for name in names)
    allowances = np.arange(8)[None]
    return Step(names, contexts, tuple(map(len, contexts)), salts, (options,) * len(names), (draw,), allowances)


def ask(told: Told, asked: Step, caller: str = "one") -> Asked:
    return GROUP.asked(StepKey(caller, 1, 0), asked, told)


def test_a_draw_of_nobody_asks_for_a_row_too() -> None:
    """Parts with keys and values of their own read the tokens of such a request, and of no public one."""
    protocol = PMixed(8, 0.5, mollifier="renyi", order=2, loss=1.0)
    group = Group(PartGroup(1, MODELS, ()), protocol, ShardCopies((), dict[str, Any]().__getitem__, 1.0))
    for draw, names in ((7,), (ZERO,)), ((5, 6, 7), ("five", "six")):
        asked = replace(step((1,), (2,), draw=draw), allowances=None)
        requests, _ = Sessions().told(group.asked(StepKey("one", 1, 0), asked, Told()))
        assert [request.adapters for request in requests] == [(PUBLIC, *names), (PUBLIC,)]
        assert group.rows_of(draw) == 1 + len(names)


def test_a_step_tells_what_has_changed() -> None:
    told, sessions = Told(), Sessions()
    asked = ask(told, step((1, 2, 3), (7,)))
    requests, given = sessions.told(asked)
    assert requests == [
        Request("a", [1, 2, 3], (PUBLIC, "five", ZERO), "salt of a"),
        Request("b", [7], (PUBLIC,), "salt of b"),
    ]
    assert given.options == (PLAIN, PLAIN)
    assert given.drawn.tolist() == [[True, False]]
    assert given.allowances is not None and given.allowances.tolist() == [[5, 0]]
    later = ask(told, step((1, 2, 3, 4, 5), (7,), options=PLAIN))
    assert (later.news.tolist(), later.changed, later.terms) == ([4, 5], {}, None)
    requests, given = sessions.told(later)
    assert [request.tokens for request in requests] == [[1, 2, 3, 4, 5], [7]]
    assert [request.cache_salt for request in requests] == ["salt of a", "salt of b"]
    _, given = sessions.told(ask(told, step((1, 2, 3, 4, 5), options=COLD)))
    assert given.options == (COLD,)


def test_what_is_not_remembered_is_told_again() -> None:
    told, sessions = Told(), Sessions()
    sessions.told(ask(told, step((1, 2), (7,))))
    longer = ask(told, step((1, 2, 3), (7,)))
    for lost in (Sessions(), Sessions()):
        with pytest.raises(LostSessionError):
            lost.told(longer)
        with pytest.raises(LostSessionError):
            lost.told(replace(ask(Told(), step((1, 2, 3))), terms=None))
        with pytest.raises(LostSessionError):
            lost.told(longer)  # nothing is remembered of a call that is refused
    sessions.forget("b")
    with pytest.raises(LostSessionError):
        sessions.told(longer)
    told.forget()
    assert sessions.told(ask(told, step((1, 2, 3), (7,))))[0][0].tokens == [1, 2, 3]
    with pytest.raises(LostSessionError):
        sessions.told(longer)  # of a call that is late, the tokens would be appended twice


def test_a_picked_token_is_known_to_those_who_are_told_of_it() -> None:
    told, sessions, context = Told(), Sessions(), [1, 2]
    sessions.told(ask(told, step((1, 2), (7,))))
    sessions.append(("a", None), np.array([3, 9]))
    told.note_picked(("a", None))
    ahead = replace(step((1, 2), (7,)), contexts=(context, (7,)), lengths=(3, 1))
    asked = ask(told, ahead)
    assert (asked.known.tolist(), asked.news.tolist()) == ([3, 1], [])
    assert [request.tokens for request in sessions.told(asked)[0]] == [[1, 2, 3], [7]]
    with pytest.raises(CoordinatorUnavailable, match="lacks a token"):
        ask(Told(), ahead)
    context.append(3)
    assert ask(Told(), ahead).news.tolist() == [1, 2, 3, 7]


def test_a_copy_that_has_a_token_is_asked_before_others_that_answer_sooner() -> None:
    copies = ShardCopies(("a", "b"), dict[str, Any]().__getitem__, 1.0)
    for copy in (0, 1):
        copies.told(copy).contexts["x"] = 5, PLAIN
        copies.told(1 - copy).contexts["x"] = 4, PLAIN
        copies.avoid(copy)
        assert copies.order("x", 5)[0] == copy
        copies._avoided = dict.fromkeys((0, 1), 0.0)
    assert copies.order("x") == copies.order("x", 4)


def test_a_late_call_of_an_earlier_step_changes_nothing() -> None:
    """With fewer tokens of "b" than are known, the news of "c" would begin with the last token of "a"."""
    told, sessions = Told(), Sessions()
    later = replace(step((1, 2, 3)), sequences=("b",))
    sessions.told(GROUP.asked(StepKey("one", 2, 0), later, told))
    with pytest.raises(LostSessionError):
        sessions.told(ask(told, step((7, 8), (1, 2), (9,))))
    with pytest.raises(LostSessionError):
        sessions.told(ask(Told(), step((7, 8), (1, 2), (9,))))  # with terms that may be old, too
    (same,), _ = sessions.told(GROUP.asked(StepKey("one", 2, 1), later, Told()))
    assert same.tokens == [1, 2, 3]


def test_the_oldest_sequences_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a coordinator that died, nobody ends the sequences."""
    monkeypatch.setattr(shards, "MOST", 2)
    told, sessions = Told(), Sessions()
    sessions.told(ask(told, step((1,), (2,))))
    sessions.told(ask(told, step((1, 3))))
    sessions.told(ask(Told(), replace(step((9,)), sequences=("new",)), "other"))
    sessions.told(ask(told, step((1, 3, 4))))
    with pytest.raises(LostSessionError):
        sessions.told(ask(told, step((1, 3, 4), (2, 5))))


def test_a_mechanism_that_draws_the_number_of_parts_has_no_padding() -> None:
    protocol = PMixed(4, 0.5, mollifier="renyi", order=3, loss=0.1)
    group = Group(PartGroup(0, {0: "zero", 1: "one"}, ()), protocol, ShardCopies((), dict[str, Any]().__getitem__, 1.0))
    drawn = replace(step((1,), draw=(0, 1)), allowances=None)
    asked = group.asked(StepKey("one", 1, 0), drawn, Told())
    assert Sessions().told(asked)[0][0].adapters == (PUBLIC, "zero", "one")


def test_a_mechanism_without_parts_asks_for_the_public_row_alone() -> None:
    group = Group(PartGroup(0, {0: "zero"}, ()), Public(1), ShardCopies((), dict[str, Any]().__getitem__, 1.0))
    asked = group.asked(StepKey("one", 1, 0), replace(step((1,), draw=()), allowances=None), Told())
    assert Sessions().told(asked)[0][0].adapters == (PUBLIC,)
