"""Claim: the exact epsilon of the worst known pair is close to a sound claim, and never exceeds it."""

import numpy as np
import pytest

from privmix.laboratory.audit import distributions
from privmix.privacy.accounting import planning
from privmix.privacy.protocols import PROTOCOLS
from tests.support.worst_cases import NoPairError, worst_epsilon

DELTA = 1e-5


@pytest.mark.parametrize("by", ["clip", "mix"])
@pytest.mark.parametrize(("parts", "tokens"), [(1, 1), (4, 1), (4, 64), (16, 1024)])
def test_the_corners_reach_the_claim_of_pmixed(parts: int, tokens: int, by: str) -> None:
    settings = PROTOCOLS["pmixed"].model_validate({"epsilon": 2.0, "tokens": tokens, "projection": by})
    protocol = settings.plan(parts)
    claim = planning.cost(protocol.event, tokens, DELTA).epsilon
    assert 0.94 * claim < worst_epsilon(protocol, tokens, DELTA) <= claim


def test_epsilon_of_two_tokens_agrees_with_that_of_three() -> None:
    """Enumeration of counts and composition of privacy loss distributions give the same epsilon for one pair."""
    p, q = np.array([0.3, 0.7]), np.array([0.2, 0.8])
    split_p, split_q = (np.array([law[0], law[1] / 2, law[1] / 2]) for law in (p, q))
    for tokens in (1, 10, 200):
        counted = distributions.tokens_epsilon(p, q, tokens, DELTA)
        assert distributions.tokens_epsilon(split_p, split_q, tokens, DELTA) == pytest.approx(
            counted, abs=1e-5 * tokens + 1e-6
        )


def test_a_token_that_only_one_world_can_release_has_infinite_epsilon() -> None:
    assert distributions.tokens_epsilon(np.array([0.1, 0.9]), np.array([0.0, 1.0]), 3, DELTA) == np.inf


def test_references_have_no_worst_case() -> None:
    with pytest.raises(NoPairError, match="ensemble"):
        worst_epsilon(PROTOCOLS["ensemble"].model_validate({}).plan(3), 1, DELTA)
