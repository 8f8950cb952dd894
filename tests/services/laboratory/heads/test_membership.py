"""Claim: LiRA distinguishes members from non-members if membership changes the models, and only then."""

import numpy as np
import pytest
from torch import Tensor

from privmix.laboratory.audit.bounds import area
from privmix.laboratory.heads import attacks, methods
from privmix.laboratory.heads.attacks import likelihood_ratios
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.table import Table
from privmix.privacy.arrays import Reals
from tests.support.tables import generated


def attacked(effect: float, seed: int = 0) -> tuple[Reals, Reals]:
    """Attacks simulated rows whose scores, like real ones, vary far more among rows than with membership."""
    generator = np.random.default_rng(seed)
    included = generator.random((80, 200)) < 0.5
    scores = 20 * generator.normal(size=200) + generator.normal(size=(80, 200)) + effect * included
    seen, ratios = included[:16], likelihood_ratios(scores[:16], scores[16:], included[16:])
    return ratios[seen], ratios[~seen]


def test_members_are_detected_by_the_scores_of_other_models() -> None:
    scores = attacked(4.0)
    assert area(*scores) > 0.98
    assert attacks.true_positives(*scores)[1] > 0.7


def test_the_attack_guesses_at_random_if_membership_has_no_effect() -> None:
    assert abs(area(*attacked(0.0)) - 0.5) < 0.06


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


def test_rates_are_those_at_a_threshold_with_so_many_false_positives() -> None:
    outside = np.arange(1000, dtype=np.float64)
    inside = np.array([2000.0, 996.5, 989.5, 500.0])
    # At most 3, 10, 30, 100 and 300 of the thousand are above the threshold.
    assert attacks.true_positives(inside, outside) == [0.5, 0.75, 0.75, 0.75, 0.75]
    assert attacks.true_positives(np.array([996.0]), outside) == [0, 1, 1, 1, 1]
    assert area(inside, np.array([600.0])) == 0.75
