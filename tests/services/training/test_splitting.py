"""Claim: `privmix plan --users` gives a private base the share of epsilon with the largest measured gain of both."""

import json
from dataclasses import replace
from functools import cache

import pytest

from services.training import expectation, splitting
from services.training.dp_sgd import planned
from services.training.expectation import Population, Requirements, propose
from services.training.options import DpSgdOptions, TokenBudget
from services.training.splitting import SHARES, Division, MeasuredBases, divide, signal

POPULATION = Population(250, 500_000)


def wanted(tokens: int, epsilon: float = 8.0) -> Requirements:
    return Requirements(POPULATION, TokenBudget(epsilon=epsilon, delta=1e-5, tokens=tokens), "exponential", 64)


@cache
def divided(tokens: int) -> Division:
    requirements = wanted(tokens)
    division = divide(requirements, propose(requirements))
    assert division is not None
    return division


def test_the_corpora_of_bases_are_measured_for_parts_too_so_that_their_gains_add_up() -> None:
    tables = json.loads(splitting.BASE_TABLE.read_bytes()), json.loads(expectation.TABLE.read_bytes())
    assert set(tables[0]["corpora"]) <= set(tables[1]["part_kind"]["reader"]["corpora"])
    for corpus in tables[0]["corpora"].values():
        assert len(corpus["gain_by_signal"]) >= 4
        assert all(0 < kept <= 1.2 for kept in corpus["kept_by_gain"].values())


def test_the_signal_is_that_of_all_steps_together() -> None:
    """With full batches, k steps with the noise sigma are one release with the noise sigma over the root of k."""
    few, many = (planned(DpSgdOptions(steps=steps)) for steps in (4, 64))
    assert signal(few, 100) == pytest.approx(signal(many, 100), rel=1e-3)
    assert signal(few, 200) == pytest.approx(2 * signal(few, 100))
    half = planned(DpSgdOptions(epsilon=4.0))
    assert signal(half, 100) < signal(planned(DpSgdOptions(epsilon=8.0)), 100) < 2 * signal(half, 100)


def test_no_other_share_gains_more() -> None:
    requirements, measured = wanted(16_384), MeasuredBases.load()
    alone, chosen = propose(requirements), divided(16_384)
    own = [alone.by_corpus[name] for name in chosen.base]
    assert chosen.gain.mean >= sum(own) / len(own)
    for share in SHARES[1:-1]:
        event = planned(DpSgdOptions(epsilon=8.0 * share))
        parts = propose(replace(requirements, base=event))
        assert parts.radius < alone.radius
        base = measured.gain(signal(event, POPULATION.users))
        both = {name: base[name] + added for name, added in measured.added(base, parts.by_corpus).items()}
        assert chosen.gain.mean >= sum(both.values()) / len(both) - 1e-12


def test_the_more_tokens_the_larger_is_the_base() -> None:
    shares = [divided(tokens).share for tokens in (1_024, 131_072, 10_000_000_000)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert shares[-1] >= 0.9
    last = divided(10_000_000_000)
    assert sum(last.added.values()) < 0.01


def test_a_weak_base_leaves_an_ensemble_its_gain() -> None:
    measured = MeasuredBases.load()
    alone = dict.fromkeys(measured.table["corpora"], 0.2)
    assert measured.added(dict.fromkeys(alone, 0.0), alone) == alone
    assert measured.gain(0.0) == dict.fromkeys(alone, 0.0)


def test_without_the_size_of_the_corpus_nothing_is_divided() -> None:
    requirements = replace(wanted(1_024), population=Population(2_000))
    assert divide(requirements, propose(requirements)) is None
