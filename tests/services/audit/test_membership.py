"""Claim: LiRA tells members from others where models differ, and not where they do not."""

from pathlib import Path

import numpy as np
import pytest

from services.audit import membership
from services.audit.membership import Size, lira
from services.audit.roc import Roc
from services.audit.sections import membership_section


def scored(effect: float, seed: int = 0) -> Roc:
    """Users who are hard or easy by far more than membership changes, as real ones are."""
    generator = np.random.default_rng(seed)
    included = generator.random((16, 200)) < 0.5
    scores = 20 * generator.normal(size=200) + generator.normal(size=(16, 200)) + effect * included
    return Roc.of(*lira(scores, included))


def test_members_are_told_by_what_the_other_models_teach() -> None:
    roc = scored(4.0)
    assert roc.area > 0.98
    assert roc.true_positives_at(0.01) > 0.7


def test_nothing_is_told_where_membership_changes_nothing() -> None:
    assert abs(scored(0.0).area - 0.5) < 0.06


def test_a_curve_has_a_point_for_every_threshold() -> None:
    roc = Roc.of(np.array([3.0, 2.0, 1.0, 0.5]), np.array([2.5, 0.0]))
    assert roc.false_positives.tolist() == [0, 0, 0.5, 0.5, 0.5, 0.5, 1]
    assert roc.true_positives.tolist() == [0, 0.25, 0.25, 0.5, 0.75, 1, 1]
    assert roc.area == pytest.approx(0.5 * 0.25 + 0.5 * 1)
    assert roc.true_positives_at(0.4) == 0.25


@pytest.mark.slow
def test_shadow_ensembles_are_trained_kept_and_attacked(tmp_path: Path) -> None:
    size, said = Size(users=6, shadows=3, parts=1), list[str]()
    membership.train_shadows(tmp_path, size, membership.TRAINING, said.append)
    membership.train_shadows(tmp_path, size, membership.TRAINING, said.append)
    assert len(said) == 3
    shadows = membership.ask(tmp_path, size, 32)
    assert shadows.included.shape == (3, 6)
    section = membership_section(shadows, [], 1e-5, 1, lambda _: None)
    assert [row["mechanism"] for row in section.rows] == ["ensemble, without privacy"]
