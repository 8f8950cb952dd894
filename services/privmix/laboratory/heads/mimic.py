"""Converts MIMIC-Extract's `all_hourly_data.h5` to the paper's tables (Wang et al. 2020; Bridges et al. 2024).

Access to the file requires credentials for MIMIC-III. The tables hold the hourly means of each variable in the first 24
hours, standardised, with masks and times since the last measurement, for stays of at least 30 hours as MIMIC-Extract
selects them. The targets are death in hospital and a stay of more than three days.
"""

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from privmix.foundation.errors import DataError
from privmix.foundation.identifiers import identifier
from privmix.foundation.units import Unit
from privmix.laboratory.heads.table import Table, owners, save_npz

HOURS, LEAST_HOURS, LONG_DAYS = 24, 30, 3.0
_STAY = ["subject_id", "hadm_id", "icustay_id"]


def prepare(file: Path, output: Path) -> dict[Path, int]:
    """Writes tables for `--dataset`; returns the number of stays in each.

    `mortality.npz` and `stay.npz` are time series, for GRU-D; `mortality-hours.npz` and `stay-hours.npz` have a column
    for each variable and hour, for logistic regression.

    Raises:
        DataError: the file does not come from MIMIC-Extract. The message names what is missing.
    """
    import tables as tables  # pandas reads HDF5 with it

    try:
        measured = pd.read_hdf(file, "vitals_labs")
        patients = pd.read_hdf(file, "patients")
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{file}: is not all_hourly_data.h5 of MIMIC-Extract: {error}") from error
    for column in ("mort_hosp", "los_icu"):
        if column not in patients:
            raise DataError(f"{file}: its table of patients has no column {column!r}")
    means = _means(measured)
    hours = means.index.get_level_values("hours_in")
    long_enough = pd.Series(hours, index=means.index).groupby(level=_STAY).max() >= LEAST_HOURS - 1
    stays = long_enough[long_enough].index
    means = means[hours < HOURS]
    index = pd.MultiIndex.from_tuples(
        [(*stay, hour) for stay in stays for hour in range(HOURS)], names=[*_STAY, "hours_in"]
    )
    values = means.reindex(index).to_numpy(dtype=np.float64)
    mean, deviation = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    kept = np.isfinite(mean) & (deviation > 0)
    standard = ((values - mean) / np.where(deviation > 0, deviation, 1.0))[:, kept]
    cube = standard.reshape(len(stays), HOURS, int(kept.sum()))
    x = series(np.nan_to_num(cube), np.isfinite(cube))
    chosen = patients.loc[stays]
    users = owners(map(identifier, stays.get_level_values("subject_id").tolist()))
    targets = {
        "mortality": chosen["mort_hosp"].to_numpy() == 1,
        "stay": chosen["los_icu"].to_numpy() > LONG_DAYS,
    }
    output.mkdir(parents=True, exist_ok=True)
    # MIMIC-Extract takes the first stay of each patient. Then a row is a person, and DP-SGD hides rows.
    unit: Unit = "record" if len(set(users.tolist())) == len(users) else "user"
    written = {}
    forms = {"": x, "-hours": x[:, :, : cube.shape[2]].reshape(len(x), -1)}
    for (name, target), (form, features) in product(targets.items(), forms.items()):
        # Means and deviations come from all private rows (the paper's: from each split), so no guarantee covers them.
        table, path = (
            Table(name, features, target.astype(np.float32), users, "private", unit),
            output / f"{name}{form}.npz",
        )
        save_npz(table, path)
        written[path] = len(table.x)
    return written


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


def _means(measured: pd.DataFrame) -> pd.DataFrame:
    """Selects the mean of each variable. MIMIC-Extract's columns are (variable, aggregate)."""
    try:
        return measured.xs("mean", axis=1, level="Aggregation Function")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError('vitals_labs: its columns must have a level "Aggregation Function" with "mean"') from error
