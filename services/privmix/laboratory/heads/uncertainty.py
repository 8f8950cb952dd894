"""Estimates uncertainty from many samples of one flow, for public data (Bridges et al. 2024, Section 5, Appendix F).

The exponential mechanism's density is a posterior with a tempered likelihood. So the samples of a flow that is fitted
to it yield intervals of predictions.
"""

from dataclasses import dataclass

import numpy as np
import torch

from privmix.laboratory.heads import expm_nf, methods
from privmix.laboratory.heads.flows import Draws
from privmix.laboratory.heads.models import Parametrised
from privmix.laboratory.heads.score import outputs
from privmix.laboratory.heads.table import Table
from privmix.privacy.arrays import Reals


@dataclass(frozen=True, eq=False)
class Intervals:
    """Holds for each row's prediction the mean over samples and the ends of a central interval, float64 [n]."""

    mean: Reals
    low: Reals
    high: Reals


def intervals(table: Table, temper: float, share: float = 0.9, samples: int = 1000) -> Intervals:
    """Fits a flow to a public table, with the setting chosen in advance, and returns intervals of its predictions.

    Args:
        temper: the factor of the loss in the density exp(-(temper / 2) L(theta)); the intervals narrow as it grows.
        share: the share of the samples' predictions in an interval.
        samples: the number of parameter vectors drawn from the flow.

    Raises:
        ValueError: the share is not between 0 and 1.
    """
    model = methods.parametrised(table)
    fitted = expm_nf.train(model, torch.from_numpy(table.x), torch.from_numpy(table.y), temper, methods.EXPM_NF, seed=0)
    return predictive_intervals(model, expm_nf.release(fitted, samples, seed=0), table, share)


def predictive_intervals(model: Parametrised, draws: Draws, table: Table, share: float = 0.9) -> Intervals:
    """Returns central intervals that contain a share of the samples' predictions for each row.

    Raises:
        ValueError: the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, got {share}")
    predictions = outputs(model, draws.values, table)
    low, high = np.quantile(predictions, [(1 - share) / 2, (1 + share) / 2], axis=0)
    return Intervals(predictions.mean(axis=0), low, high)
