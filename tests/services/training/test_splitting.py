"""Claim: `privmix plan --users` gives a private base the share of epsilon with the largest measured gain of both."""

from dataclasses import replace
from functools import cache

import pytest

from privmix.foundation.errors import InputError
from privmix.training.dp_sgd import planned
from privmix.training.expectation import Population, Requirements, propose
from privmix.training.options import DpSgdOptions, TokenBudget
from privmix.training.splitting import SHARES, Division, MeasuredBases, alternatives, base_share, divide, signal

POPULATION = Population(250, 500_000)


def wanted(tokens: int, epsilon: float = 8.0) -> Requirements:
    return Requirements(POPULATION, TokenBudget(epsilon=epsilon, delta=1e-5, tokens=tokens), "exponential", 64)


@cache
def divided(tokens: int, shares: tuple[float, ...] = SHARES) -> Division:
    requirements = wanted(tokens)
    division = divide(requirements, propose(requirements, roughly=shares != SHARES), shares)
    assert division is not None
    return division


def test_the_signal_is_that_of_all_steps_together() -> None:
    """With full batches, k steps with the noise sigma are one release with the noise sigma over the root of k."""
    few, many = (planned(DpSgdOptions(steps=steps)) for steps in (4, 64))
    assert signal(few, 100) == pytest.approx(signal(many, 100), rel=1e-3)
    assert signal(few, 200) == pytest.approx(2 * signal(few, 100))
    half = planned(DpSgdOptions(epsilon=4.0))
    assert signal(half, 100) < signal(planned(DpSgdOptions(epsilon=8.0)), 100) < 2 * signal(half, 100)


def test_the_noise_of_a_comparison_is_nearly_what_a_training_gets() -> None:
    for options in (DpSgdOptions(epsilon=4.0), DpSgdOptions(epsilon=8.0), DpSgdOptions(steps=64)):
        exact, rough = planned(options), planned(options, roughly=True)
        assert rough.noise_multiplier <= exact.noise_multiplier <= rough.noise_multiplier * (1 + 1e-4)


def test_no_other_share_gains_more() -> None:
    """By exact composition, but for the share beside it: they are compared without it, and differ by half a percent."""
    requirements, measured = wanted(16_384), MeasuredBases.load()
    alone, chosen = propose(requirements), divided(16_384)
    own = [alone.by_corpus[name] for name in chosen.base]
    assert chosen.worth >= sum(own) / len(own)
    beside = SHARES[SHARES.index(chosen.share) + 1]
    for share in (0.1, 0.5, beside, 0.9):
        event = planned(DpSgdOptions(epsilon=8.0 * share))
        parts = propose(replace(requirements, base=event))
        assert parts.radius < alone.radius
        base = measured.gain(signal(event, POPULATION.users))
        both = {name: base[name] + added for name, added in measured.added(base, parts.by_corpus).items()}
        assert chosen.worth * (1.005 if share == beside else 1) >= sum(both.values()) / len(both) - 1e-12


def test_a_weak_base_leaves_an_ensemble_its_gain() -> None:
    measured = MeasuredBases.load()
    alone = dict.fromkeys(measured.table["corpora"], 0.2)
    assert measured.added(dict.fromkeys(alone, 0.0), alone) == alone
    assert measured.gain(0.0) == dict.fromkeys(alone, 0.0)


@pytest.mark.slow
def test_an_assumed_size_still_gives_a_share_between_both_ends() -> None:
    """With 4 parts, parts add nothing, which a stated size would say."""
    budget = TokenBudget(epsilon=2.0, delta=1e-5, tokens=131_072)
    assert 0 < base_share(4, budget) < 1
    assert alternatives(Requirements(Population(100, 51_200), budget, parts=4))[0].share == 1
    with pytest.raises(InputError, match=r"epsilon: is too small|does not last"):
        base_share(4, budget.model_copy(update={"epsilon": 1e-6}))
