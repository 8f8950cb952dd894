"""Claim: LiRA distinguishes members from non-members if membership changes the models, and only then."""

import numpy as np
import pytest

from privmix.laboratory.audit.roc import Roc
from privmix.laboratory.heads.attacks import lira


def scored(effect: float, seed: int = 0) -> Roc:
    """Attacks simulated users whose scores, like real ones, vary far more among users than with membership."""
    generator = np.random.default_rng(seed)
    included = generator.random((16, 200)) < 0.5
    scores = 20 * generator.normal(size=200) + generator.normal(size=(16, 200)) + effect * included
    return Roc.of(*lira(scores, included))


def test_members_are_detected_by_the_scores_of_other_models() -> None:
    roc = scored(4.0)
    assert roc.area > 0.98
    assert roc.true_positives_at(0.01) > 0.7


def test_the_attack_guesses_at_random_if_membership_has_no_effect() -> None:
    assert abs(scored(0.0).area - 0.5) < 0.06


def test_a_curve_has_a_point_for_every_threshold() -> None:
    roc = Roc.of(np.array([3.0, 2.0, 1.0, 0.5]), np.array([2.5, 0.0]))
    assert roc.false_positives.tolist() == [0, 0, 0.5, 0.5, 0.5, 0.5, 1]
    assert roc.true_positives.tolist() == [0, 0.25, 0.25, 0.5, 0.75, 1, 1]
    assert roc.area == pytest.approx(0.5 * 0.25 + 0.5 * 1)
    assert roc.true_positives_at(0.4) == 0.25
