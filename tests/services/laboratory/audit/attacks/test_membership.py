"""Claim: LiRA distinguishes members from non-members if membership changes the models, and only then."""

import numpy as np
import pytest
import torch

from privmix.laboratory.audit.attacks.membership import Observation, lira, scores
from privmix.laboratory.audit.report.roc import Roc
from privmix.laboratory.audit.worlds.models import ModelOutput
from privmix.laboratory.audit.worlds.shadow_ensembles import Shadows
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.public import Public


def scored(effect: float, seed: int = 0) -> Roc:
    """Attacks simulated users whose scores, like real ones, vary far more among users than with membership."""
    generator = np.random.default_rng(seed)
    included = generator.random((16, 200)) < 0.5
    scores = 20 * generator.normal(size=200) + generator.normal(size=(16, 200)) + effect * included
    return Roc.of(*lira(scores, included))


def test_members_are_detected_by_the_scores_of_other_ensembles() -> None:
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


def test_the_score_by_tokens_approaches_the_score_by_probabilities() -> None:
    likely, unlikely = np.full(10, 0.6), np.full(10, 0.2)
    exact, few, many = (Observation(Public(1), tokens) for tokens in (None, 10, 1_000_000))
    assert exact.score(likely) == pytest.approx(np.log(0.6))
    assert many.score(likely) == pytest.approx(0.6, abs=0.01)
    assert many.score(unlikely) == pytest.approx(0.2, abs=0.01)
    assert {few.score(likely) for _ in range(99)} <= {hits / 10 for hits in range(11)}, "one token per position"


@pytest.mark.slow
def test_the_public_model_answers_after_the_end_of_a_budget_whose_cost_depends_on_the_text() -> None:
    """AdaPMixed as published, with one part, releases that part's distribution until its budget ends."""
    places, kept, tokens = 8, 16, 64
    wanted = torch.arange(places)
    model = torch.zeros(2, places, kept)
    model[0, torch.arange(places), wanted] = 6.0
    outputs = ModelOutput(torch.zeros(places, kept).log_softmax(1), model.log_softmax(2), wanted)
    shadows = Shadows(np.array([[True]]), [outputs], 2)

    def score(epsilon: float) -> float:
        settings = PROTOCOLS["adapmixed"].model_validate({"mollifier": "renyi", "epsilon": epsilon, "tokens": tokens})
        return float(np.mean([scores(Observation(settings.plan(2), tokens, settings), shadows, 1) for _ in range(400)]))

    none, some, all_ = (score(epsilon) for epsilon in (0.5, 64.0, 1000.0))
    assert none == pytest.approx(1 / kept, abs=0.01), "the public model alone"
    assert none + 0.05 < some < all_ - 0.05
