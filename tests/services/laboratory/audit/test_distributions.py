"""Claim: the epsilon of many tokens is that of their exact distributions."""

import numpy as np
import pytest

from privmix.laboratory.audit import distributions

DELTA = 1e-5


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
