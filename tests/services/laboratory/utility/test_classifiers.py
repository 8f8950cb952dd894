"""Claim: both classifiers learn a task, their scores follow the definitions, and intervals cover people and texts."""

import numpy as np
import pytest
from sklearn.metrics import f1_score

from privmix.laboratory.utility.classifiers import CLASSIFIERS, Classifier, Examples, evaluate, macro_f1
from privmix.privacy.arrays import Integers, Reals


def examples(count: int, seed: int, distance: float, users: int | None = None) -> Examples:
    """Returns points of three classes around the corners of a triangle."""
    chance = np.random.default_rng(seed)
    classes = chance.integers(3, size=count)
    rows = chance.normal(size=(count, 8)) + distance * np.eye(8)[classes]
    return Examples(rows, classes, np.arange(count) % (users or count))


@pytest.mark.parametrize("classify", CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_a_classifier_learns_what_can_be_learned(classify: Classifier) -> None:
    easy = evaluate(examples(150, 0, 6), examples(100, 1, 6), classify, seeds=3)
    assert easy.accuracy.low > 0.95
    chance = evaluate(examples(150, 0, 0), examples(300, 1, 0), classify, seeds=3)
    assert chance.accuracy.mean == pytest.approx(1 / 3, abs=0.12)


@pytest.mark.parametrize("classify", CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_a_class_that_a_training_set_lacks_is_never_answered(classify: Classifier) -> None:
    whole = examples(150, 0, 6)
    kept = whole.classes != 2
    found = classify(whole.rows[kept], whole.classes[kept], whole.rows, 0)
    assert set(found.tolist()) == {0, 1}
    alone = whole.classes == 1
    assert set(classify(whole.rows[alone], whole.classes[alone], whole.rows, 0).tolist()) == {1}


def test_the_small_head_is_the_same_with_the_same_seed() -> None:
    train, held_out = examples(90, 0, 1), examples(90, 1, 1)
    answers = [CLASSIFIERS["small head"](train.rows, train.classes, held_out.rows, seed).tolist() for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_macro_f1_is_the_mean_over_the_classes_of_the_truth() -> None:
    chance = np.random.default_rng(0)
    truth, found = chance.integers(4, size=200), chance.integers(5, size=200)
    expected = f1_score(truth, found, labels=np.unique(truth), average="macro", zero_division=0)
    assert macro_f1(truth, found) == pytest.approx(expected)


def right_for_user_0(rows: Reals, classes: Integers, wanted: Reals, seed: int) -> Integers:
    return np.array([0 if row[0] == 0 else 1 for row in wanted])


def test_an_interval_covers_the_choice_of_people() -> None:
    """All 50 texts of one person are right and all 50 of the other are wrong. Two people are drawn, so the accuracy is
    0, 1/2 or 1."""
    rows = np.repeat([[0.0], [1.0]], 50, axis=0)
    held_out = Examples(rows, np.zeros(100, dtype=np.int64), rows[:, 0].astype(np.int64))
    score = evaluate(examples(10, 0, 1), held_out, right_for_user_0, seeds=60).accuracy
    assert (score.low, score.high) == (0, 1)


def test_sets_of_any_size_are_tested_on_the_same_people() -> None:
    """The classifier is right for one of two people, so two sets score alike only if both draw the same people."""
    rows = np.repeat([[0.0], [1.0]], 50, axis=0)
    held_out = Examples(rows, np.zeros(100, dtype=np.int64), rows[:, 0].astype(np.int64))
    half = evaluate(examples(11, 0, 1), held_out, right_for_user_0, seeds=60)
    again = evaluate(examples(37, 0, 1), held_out, right_for_user_0, seeds=60)
    assert (half.over(again).low, half.over(again).high) == (0, 0)
    assert half.accuracy.low < half.accuracy.high
