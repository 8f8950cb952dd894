"""Computes receiver operating characteristics, and chooses the test with the best bound on epsilon."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from privmix.laboratory.audit.bounds import two_sample_epsilon
from privmix.privacy.arrays import Reals

# The maximum number of thresholds.
_MAX_THRESHOLDS = 2000
# The confidence for the choice of a test, between the two confidences of its evaluation.
_CHOICE_CONFIDENCE = 0.999


@dataclass(frozen=True, eq=False)
class Roc:
    """The fraction of either world's scores at or above each threshold, for descending thresholds.

    Attributes:
        false_positives: float64 [K], ascending, from 0 to 1.
        true_positives: float64 [K].
    """

    false_positives: Reals
    true_positives: Reals

    @classmethod
    def of(cls, positive: Reals, negative: Reals) -> "Roc":
        """Returns the curve for the scores of two worlds. High scores indicate the first."""
        thresholds = _thresholds(positive, negative)
        return cls(*(np.concatenate([[0.0], _reaching(scores, thresholds)]) for scores in (negative, positive)))

    @property
    def area(self) -> float:
        """The area under the curve; random guesses give 1/2."""
        return float(np.trapezoid(self.true_positives, self.false_positives))

    def true_positives_at(self, false_positives: float) -> float:
        """Returns the largest true-positive rate at a false-positive rate of at most ``false_positives``."""
        return float(self.true_positives[self.false_positives <= false_positives].max(initial=0.0))


@dataclass(frozen=True)
class Test:
    """A test that answers "present" at scores of at least ``threshold``; mirrored, "absent" below it."""

    threshold: float
    mirrored: bool


def best_test(present: Reals, absent: Reals, delta: float, confidence: float) -> Test:
    """Returns the test with the largest lower bound on epsilon for these scores."""
    thresholds = _thresholds(present, absent)
    bounds = [
        _bound(present, absent, thresholds, mirrored=mirrored, delta=delta, confidence=confidence)
        for mirrored in (False, True)
    ]
    direction = int(bounds[1].max() > bounds[0].max())
    return Test(float(thresholds[bounds[direction].argmax()]), bool(direction))


def epsilon_of(test: Test, present: Reals, absent: Reals, delta: float, confidence: float) -> float:
    """Bounds epsilon from below by scores that did not take part in the choice of the test."""
    thresholds = np.array([test.threshold])
    return float(_bound(present, absent, thresholds, mirrored=test.mirrored, delta=delta, confidence=confidence)[0])


def held_out_epsilons(present: Reals, absent: Reals, delta: float, confidences: Sequence[float]) -> list[float]:
    """Bounds epsilon from below. One half of the scores in each world chooses the test; the other gives the bounds."""
    (choosing, measured), (choosing_without, measured_without) = (
        np.array_split(scores, 2) for scores in (present, absent)
    )
    test = best_test(choosing, choosing_without, delta, _CHOICE_CONFIDENCE)
    return [epsilon_of(test, measured, measured_without, delta, confidence) for confidence in confidences]


def _bound(
    present: Reals, absent: Reals, thresholds: Reals, *, mirrored: bool, delta: float, confidence: float
) -> Reals:
    hits, alarms = (len(scores) * _reaching(scores, thresholds) for scores in (present, absent))
    if mirrored:
        return two_sample_epsilon(
            len(absent) - alarms, len(absent), len(present) - hits, len(present), delta, confidence
        )
    return two_sample_epsilon(hits, len(present), alarms, len(absent), delta, confidence)


def _reaching(scores: Reals, thresholds: Reals) -> Reals:
    return np.asarray(1 - np.searchsorted(np.sort(scores), thresholds) / len(scores))


def _thresholds(first: Reals, second: Reals) -> Reals:
    """Returns thresholds in descending order."""
    values = np.unique(np.concatenate([first, second]))[::-1]
    if len(values) > _MAX_THRESHOLDS:
        values = values[np.unique(np.linspace(0, len(values) - 1, _MAX_THRESHOLDS).astype(int))]
    return np.asarray(values)
