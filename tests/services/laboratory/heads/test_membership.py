"""Claim: LiRA distinguishes members from non-members if membership changes the models, and only then."""

import numpy as np
import pytest
from torch import Tensor

from privmix.laboratory.audit.roc import Roc
from privmix.laboratory.heads import attacks, methods
from privmix.laboratory.heads.attacks import likelihood_ratios
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.table import Table
from tests.support.tables import generated


def attacked(effect: float, seed: int = 0) -> Roc:
    """Attacks simulated rows whose scores, like real ones, vary far more among rows than with membership."""
    generator = np.random.default_rng(seed)
    included = generator.random((80, 200)) < 0.5
    scores = 20 * generator.normal(size=200) + generator.normal(size=(80, 200)) + effect * included
    seen, ratios = included[:16], likelihood_ratios(scores[:16], scores[16:], included[16:])
    return Roc.of(ratios[seen], ratios[~seen])


def test_members_are_detected_by_the_scores_of_other_models() -> None:
    roc = attacked(4.0)
    assert roc.area > 0.98
    assert roc.true_positives_at(0.01) > 0.7


def test_the_attack_guesses_at_random_if_membership_has_no_effect() -> None:
    assert abs(attacked(0.0).area - 0.5) < 0.06


def test_each_row_has_normal_distributions_of_its_own() -> None:
    """The same two scores tell much of a row whose scores hardly vary, and little of one whose scores do."""
    seen = np.arange(200)[:, None] % 2 == np.zeros((1, 2))
    scores = seen + np.random.default_rng(0).normal(size=(200, 2)) * [0.1, 10.0]
    certain, vague = likelihood_ratios(np.array([[1.0, 1.0]]), scores, seen)[0]
    assert certain > 20
    assert abs(vague) < 1


def test_shadows_are_not_private_and_attack_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[str, int]] = []

    def released(self: object, table: Table, epsilon: float, seed: int) -> Tensor:
        trained.append((next(name for name, method in METHODS.items() if method is self), len(table.x)))
        return release(self, table, epsilon, seed)  # type: ignore[arg-type]

    release = methods.Method.release
    monkeypatch.setattr(methods.Method, "release", released)
    found = attacks.membership(["expm-certified"], generated(80), 1.0, shadows=64, attacked=2)["expm-certified"]
    assert [name for name, _ in trained] == ["non-private"] * 64 + ["expm-certified"] * 2
    assert all(20 < rows < 60 for _, rows in trained), "halves of the rows"
    assert 0 <= found["area"] <= 1
    low, middle, high = np.array(found["true_positives"])
    assert ((low <= middle) & (middle <= high)).all()
    assert 0.8 < found["normality"] <= 1


def test_a_curve_has_a_point_for_every_threshold() -> None:
    roc = Roc.of(np.array([3.0, 2.0, 1.0, 0.5]), np.array([2.5, 0.0]))
    assert roc.false_positives.tolist() == [0, 0, 0.5, 0.5, 0.5, 0.5, 1]
    assert roc.true_positives.tolist() == [0, 0.25, 0.25, 0.5, 0.75, 1, 1]
    assert roc.area == pytest.approx(0.5 * 0.25 + 0.5 * 1)
    assert roc.true_positives_at(0.4) == 0.25
