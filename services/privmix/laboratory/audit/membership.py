"""Infers membership by the likelihood-ratio attack, LiRA (Carlini et al. 2022), on shadow models.

Attacks each model in turn. The other models give two normal distributions of a target's score: one of models with the
target, one of models without.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from privmix.privacy.arrays import Reals

# The minimum standard deviation of the scores, for samples too small to estimate it.
_LEAST_DEVIATION = 1e-6


def lira(scored: Reals, included: NDArray[np.bool_]) -> tuple[Reals, Reals]:
    """Returns the log-likelihood ratios of members and of non-members; attacks each model with the others.

    Shares one variance among targets, which is better with few shadows (Carlini et al. 2022, section VI).
    """
    ratios = np.full(scored.shape, np.nan)
    for target in range(len(scored)):
        rest = np.arange(len(scored)) != target
        inside, outside = (np.where(included[rest] == side, scored[rest], np.nan) for side in (True, False))
        known = (~np.isnan(inside)).any(axis=0) & (~np.isnan(outside)).any(axis=0)
        means = [np.nanmean(side[:, known], axis=0) for side in (inside, outside)]
        residuals = [side[:, known] - mean for side, mean in zip((inside, outside), means, strict=True)]
        deviations = [max(float(np.nanstd(residual)), _LEAST_DEVIATION) for residual in residuals]
        own = scored[target, known]
        ratios[target, known] = norm.logpdf(own, means[0], deviations[0]) - norm.logpdf(own, means[1], deviations[1])
    valid = ~np.isnan(ratios)
    return ratios[valid & included], ratios[valid & ~included]
