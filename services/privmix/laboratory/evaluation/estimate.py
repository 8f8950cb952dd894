"""Estimates means over runs with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.stats import t

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """Holds a mean over independent runs with its 95 % interval (Student's t); a single run has no interval.

    Attributes:
        runs: the value of each run.
    """

    mean: float
    low: float | None
    high: float | None
    runs: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Estimates the mean of the values."""
        mean, half = _mean(values)
        return cls(mean, *_around(mean, half), tuple(values))

    @classmethod
    def of_logarithms(cls, logs: Sequence[float]) -> Self:
        """Estimates the geometric mean from logarithms.

        For the perplexities of runs of equal length, it is the perplexity of all tokens together.
        """
        mean, half = _mean(logs)
        low, high = (None if end is None else math.exp(end) for end in _around(mean, half))
        return cls(math.exp(mean), low, high, tuple(map(math.exp, logs)))

    @classmethod
    def of_ratio(cls, sums: Sequence[float], counts: Sequence[int]) -> Self:
        """Estimates the mean of all values of all runs, from each run's sum and number of values.

        Runs without a value do not count. The interval is that of the ratio of two means, linearised (Cochran 1977,
        chapter 6).

        Raises:
            ValueError: no run has a value.
        """
        pairs = [(total, count) for total, count in zip(sums, counts, strict=True) if count]
        if not pairs:
            raise ValueError("counts: all are 0")
        all_counts = sum(count for _, count in pairs)
        mean = sum(total for total, _ in pairs) / all_counts
        average = all_counts / len(pairs)
        _, half = _mean([(total - mean * count) / average for total, count in pairs])
        return cls(mean, *_around(mean, half), tuple(total / count for total, count in pairs))


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and half the width of its interval."""
    mean = float(np.mean(values))
    if len(values) < 2 or not math.isfinite(mean):
        return mean, None
    quantile = float(t.ppf((1 + LEVEL) / 2, len(values) - 1))
    return mean, quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _around(mean: float, half: float | None) -> tuple[float | None, float | None]:
    return (None, None) if half is None else (mean - half, mean + half)
