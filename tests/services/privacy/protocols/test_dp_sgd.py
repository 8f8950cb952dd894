"""Claim: DP-SGD's training has the cost that dp-accounting computes, charged once for any number of tokens."""

from dataclasses import dataclass

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.mechanism_calibration import ExplicitBracketInterval, calibrate_dp_mechanism
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from privmix.budget.filter import Filter
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.privacy import accounting
from privmix.privacy.accounting import planning
from privmix.privacy.protocols.dp_sgd import DpSgdEvent, DpSgdSettings, noise_multiplier

DELTA = 1e-5
EVENT = DpSgdEvent("user", 1.1, 0.05, 100, "first")


def test_the_noise_of_subsampled_batches_is_the_smallest() -> None:
    epsilon, rate, steps = 4.0, 0.05, 100
    multiplier = noise_multiplier(epsilon, DELTA, rate, steps)
    calibrated = calibrate_dp_mechanism(
        lambda: PLDAccountant(value_discretization_interval=1e-3),
        lambda noise: SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps),
        epsilon,
        DELTA,
        bracket_interval=ExplicitBracketInterval(0.5, 4.0),
        tol=1e-3,
    )
    assert multiplier == pytest.approx(calibrated, rel=0.01)
    assert epsilon - 0.02 < DpSgdEvent("record", multiplier, rate, steps).epsilon(DELTA) <= epsilon


def test_no_noise_suffices_for_a_tiny_epsilon() -> None:
    with pytest.raises(ValueError, match="is too small for 1000000000 steps"):
        noise_multiplier(1e-9, 1e-30, 1.0, 10**9)


def test_the_divergence_is_exact_at_whole_orders_and_a_bound_between_them() -> None:
    accountant = RdpAccountant([2, 3, 4, 9])
    accountant.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(1.1)), 100)
    np.testing.assert_allclose(EVENT.rdp([2, 3, 4, 9]), accountant.rdp, rtol=1e-12)
    between = np.array([1.5, 2.5, 3.25, 7.9])
    exact = RdpAccountant(between)
    exact.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(1.1)), 100)
    bound = EVENT.rdp(between)
    assert np.isfinite(exact.rdp).all()
    assert (bound >= exact.rdp).all()
    assert (bound <= EVENT.rdp(np.ceil(between))).all()


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate", "steps"), [(0.01, 1e-5, 0.01, 100), (0.001, 1e-12, 1.0, 100), (0.001, 1e-12, 0.01, 10)]
)
def test_small_epsilons_have_the_smallest_noise(epsilon: float, delta: float, rate: float, steps: int) -> None:
    noise = noise_multiplier(epsilon, delta, rate, steps)
    budget = DpSgdSettings(epsilon=epsilon, delta=delta, noise_multiplier=noise, sampling_rate=rate, steps=steps)
    terms = PrivacyBudget.of("clinic", budget, budget.plan(1))
    assert Filter(terms).affordable({}, budget.plan(1).event) > 0, "the ledger grants what was planned"
    # dp-accounting on a grid of its own.
    step = GaussianDpEvent(noise * 0.99)
    less = PLDAccountant(value_discretization_interval=epsilon / 2000)
    less.compose(SelfComposedDpEvent(step if rate == 1.0 else PoissonSampledDpEvent(rate, step), steps))
    assert less.get_epsilon(delta) > epsilon


@pytest.mark.parametrize(("epsilon", "steps"), [(1.0, 1), (2.0, 40), (8.0, 20)])
def test_full_batches_have_the_cost_of_gaussian_mechanisms(epsilon: float, steps: int) -> None:
    """dp-accounting composes the steps one by one; the noise is the least, by the exact delta (Balle & Wang 2018)."""
    noise = noise_multiplier(epsilon, DELTA, 1.0, steps)
    event = DpSgdEvent("user", noise, 1.0, steps)
    orders = np.array([1.01, 1.5, 2.0, 7.3, 64.0])
    accountant = RdpAccountant(orders)
    accountant.compose(GaussianDpEvent(noise), steps)
    np.testing.assert_allclose(event.rdp(orders), accountant.rdp, rtol=1e-12)
    stepwise = PLDAccountant(value_discretization_interval=1e-4)
    stepwise.compose(SelfComposedDpEvent(GaussianDpEvent(noise), steps))
    assert event.epsilon(DELTA) == pytest.approx(stepwise.get_epsilon(DELTA), abs=5e-3)
    assert epsilon - 1e-3 < event.epsilon(DELTA) <= epsilon
    assert accounting.pld_epsilon({event: 7}, DELTA) == event.epsilon(DELTA), "a ledger's number is the calibrated one"
    least = DpSgdEvent("user", noise * 0.9995, 1.0, steps)
    assert least.epsilon(DELTA) > epsilon


def test_any_number_of_tokens_has_the_cost_of_the_training() -> None:
    once, often = (planning.cost(EVENT, tokens, DELTA) for tokens in (1, 10**9))
    assert (once.epsilon_rdp, once.epsilon_pld) == (often.epsilon_rdp, often.epsilon_pld)
    assert often.epsilon_pld == pytest.approx(EVENT.epsilon(DELTA), abs=1e-9)
    assert planning.cost(EVENT, 0, DELTA).epsilon_rdp == 0


def test_two_trainings_add_up() -> None:
    second = DpSgdEvent("user", 1.1, 0.05, 100, "second")
    np.testing.assert_allclose(accounting.rdp({EVENT: 7, second: 3}), 2 * accounting.rdp({EVENT: 1}))
    both, single = accounting.pld_epsilon({EVENT: 7, second: 3}, DELTA), EVENT.epsilon(DELTA)
    assert both is not None
    assert 1.3 * single < both < 2 * single


@dataclass(frozen=True)
class Trained:
    event: DpSgdEvent
    epsilon: float
    delta: float


TRAINING = Trained(EVENT, 5.0, DELTA)


def test_serving_checks_the_training() -> None:
    served = DpSgdSettings().for_training(TRAINING)
    assert served.plan(1).event == EVENT
    assert (served.epsilon, served.delta) == (5.0, DELTA)
    assert DpSgdSettings(epsilon=7.0).for_training(TRAINING).epsilon == 7.0
    with pytest.raises(ValueError, match="steps: the ensemble was trained with 100"):
        DpSgdSettings(steps=99).for_training(TRAINING)
    with pytest.raises(ValueError, match=r"epsilon: the training cost .* more than 1;"):
        DpSgdSettings(epsilon=1.0).for_training(TRAINING)
    with pytest.raises(ValueError, match=r"epsilon: the training cost .* at delta 1e-30"):
        DpSgdSettings(delta=1e-30).for_training(TRAINING)
