"""Claim: the published accounting agrees with an independent implementation of the theorems."""

import math

import pytest
from dp_accounting.rdp import compute_epsilon

from privmix.privacy.accounting import planning
from privmix.privacy.accounting.published import query_loss, subsampled_loss, total_loss
from privmix.privacy.protocols.pmixed import PublishedEvent

ORDER, EPSILON, DELTA, TOKENS = 3, 8.0, 1e-5, 1024  # the defaults of the paper


def test_theorem_5_1() -> None:
    assert query_loss(3, 1, 0.2) == pytest.approx(0.6)
    assert query_loss(3, 4, 0.2) == pytest.approx(math.log((3 + math.exp(2 * 4 * 0.2 * 3)) / 4) / 2)
    assert query_loss(3, 4, 1e3) == pytest.approx(12e3 - math.log(4) / 2), "no overflow"


def test_theorem_c_4_at_order_two() -> None:
    expected = math.log((1 - 0.1) * (1 + 0.1) + 0.01 * math.exp(query_loss(2, 7, 0.3)))
    assert subsampled_loss(2, 0.1, 7, 0.3) == pytest.approx(expected)
    assert subsampled_loss(5, 1.0, 7, 0.3) == pytest.approx(query_loss(5, 7, 0.3)), "without subsampling"


@pytest.mark.parametrize("order", [3, 18, 64])
def test_the_total_loss_converts_back_to_the_budget(order: int) -> None:
    assert compute_epsilon([order], [total_loss(order, 8.0, 1e-5)], 1e-5)[0] == pytest.approx(8.0)


def test_a_token_costs_its_loss_up_to_its_own_order_and_is_unknown_beyond() -> None:
    event = PublishedEvent(8, 0.25, ORDER, 0.003)
    around = [1.5, ORDER - 1, math.nextafter(ORDER, 0), ORDER, math.nextafter(ORDER, 4), ORDER + 1]
    assert event.rdp(around).tolist() == [0.003] * 4 + [math.inf] * 2
    assert planning.cost(event, 100, DELTA).best_order == ORDER


def test_an_impossible_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves nothing to spend at order 3; order 18 leaves most"):
        total_loss(3, 1.0, 1e-5)
    with pytest.raises(ValueError, match="integer"):
        subsampled_loss(1, 0.1, 3, 0.1)
