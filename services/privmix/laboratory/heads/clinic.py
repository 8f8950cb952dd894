"""Generates time series of a fictional clinic: they predict who gets worse, and 89 % of the measurements are missing.

Every stay has a hidden severity that drifts. Vital signs follow it. Severe cases are measured more often, so missing
values are informative, as in intensive care (Che et al. 2018, Figure 1).
"""

import numpy as np
from numpy.typing import NDArray

from privmix.laboratory.heads.table import Table

STAYS, VARIABLES, HOURS = 4000, 12, 24
MISSING = 0.89


def clinic(stays: int = STAYS) -> Table:
    """Returns a table of generated stays, [stays, 24, 3 * 12]. It contains no real data, so its scaling is public."""
    rng = np.random.default_rng(0)
    severity = np.cumsum(rng.normal(scale=0.25, size=(stays, HOURS)), axis=1) + rng.normal(size=(stays, 1))
    loading = rng.normal(size=VARIABLES)
    values = severity[:, :, None] * loading + rng.normal(scale=1.0, size=(stays, HOURS, VARIABLES))
    # Variables are measured at very different rates.
    rates = np.exp(rng.normal(scale=0.8, size=VARIABLES))
    chance = rates * np.exp(0.3 * severity[:, :, None])
    measured = rng.random(chance.shape) < np.minimum(1.0, chance * (1 - MISSING) / chance.mean())
    risk = severity[:, -6:].mean(axis=1) + 0.5 * rng.normal(size=stays)
    target = risk > np.quantile(risk, 0.75)
    return Table("clinic", series(values, measured), target.astype(np.float32), np.arange(stays), population=stays)


def series(values: NDArray[np.float64], measured: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Returns standardised values carried forward, masks, and days since the last measurement, float32 [n, T, 3 F].

    Args:
        values: float64 [n, T, F], standardised. Only measured values are read.
        measured: bool [n, T, F].
    """
    n, hours, variables = values.shape
    carried, last = np.zeros((n, hours, variables)), np.zeros((n, variables))
    since, elapsed = np.zeros((n, hours, variables)), np.zeros((n, variables))
    for hour in range(hours):
        since[:, hour] = elapsed
        last = np.where(measured[:, hour], values[:, hour], last)
        carried[:, hour] = last
        elapsed = np.where(measured[:, hour], 1.0, elapsed + 1.0)
    return np.asarray(np.concatenate([carried, measured, since / 24], axis=2), dtype=np.float32)
