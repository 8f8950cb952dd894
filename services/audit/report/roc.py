"""Receiver operating characteristics: what a score tells of which world it came from."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from services.audit.report.bounds import Reals, two_sample_epsilon

# Thresholds looked at, where scores take more values.
_MOST_THRESHOLDS = 2000


@dataclass(frozen=True, eq=False)
class Roc:
    """For every threshold the share of either world's scores that reach it, from none to all.

    Attributes:
        false_positives: float64 [K], ascending, from 0 to 1.
        true_positives: float64 [K].
    """

    false_positives: Reals
    true_positives: Reals

    @classmethod
    def of(cls, positive: Reals, negative: Reals) -> "Roc":
        """From the scores of both worlds, where a high one speaks for the first."""
        thresholds = _thresholds(positive, negative)
        return cls(*(np.concatenate([[0.0], _reaching(scores, thresholds)]) for scores in (negative, positive)))

    @property
    def area(self) -> float:
        """Under the curve: 1/2 is a guess."""
        return float(np.trapezoid(self.true_positives, self.false_positives))

    def true_positives_at(self, false_positives: float) -> float:
        """The largest share found at a false-positive rate of at most this."""
        return float(self.true_positives[self.false_positives <= false_positives].max(initial=0.0))

    def record(self, points: int = 200) -> dict[str, Any]:
        """The curve for programs, thinned out."""
        chosen = np.unique(np.linspace(0, len(self.false_positives) - 1, points).astype(int))
        return {
            "false_positives": self.false_positives[chosen].tolist(),
            "true_positives": self.true_positives[chosen].tolist(),
        }


@dataclass(frozen=True)
class Test:
    """Say "present" at scores of at least ``threshold``; or, mirrored, "absent" at scores below it."""

    threshold: float
    mirrored: bool


def best_test(present: Reals, absent: Reals, delta: float, confidence: float) -> Test:
    """The test with the largest lower bound on epsilon for these scores."""
    thresholds = _thresholds(present, absent)
    bounds = [
        _bound(present, absent, thresholds, mirrored=mirrored, delta=delta, confidence=confidence)
        for mirrored in (False, True)
    ]
    direction = int(bounds[1].max() > bounds[0].max())
    return Test(float(thresholds[bounds[direction].argmax()]), bool(direction))


def epsilon_of(test: Test, present: Reals, absent: Reals, delta: float, confidence: float) -> float:
    """Lower bound on epsilon from scores that the test was not chosen by."""
    thresholds = np.array([test.threshold])
    return float(_bound(present, absent, thresholds, mirrored=test.mirrored, delta=delta, confidence=confidence)[0])


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
    """Descending."""
    values = np.unique(np.concatenate([first, second]))[::-1]
    if len(values) > _MOST_THRESHOLDS:
        values = values[np.unique(np.linspace(0, len(values) - 1, _MOST_THRESHOLDS).astype(int))]
    return np.asarray(values)
