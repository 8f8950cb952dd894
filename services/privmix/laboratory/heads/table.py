"""Holds tables and time series with a binary target, and splits them by owner.

parts = split(table, seed=0)
parts.train.x, parts.train.y
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from privmix.foundation.errors import DataError
from privmix.foundation.units import Unit

Scaling = Literal["public", "private"]

UNSTATED = (
    "about how many rows (or users, with --user-field) it has is not stated; give --population. The number is public, "
    "so it is not counted"
)

FRACTIONS = (0.7, 0.1, 0.2)
"""The fractions of the rows for training, validation and test; the paper gives none."""


@dataclass(frozen=True, eq=False)
class Table:
    """Holds rows with a binary target.

    Attributes:
        name: the name of the data set.
        x: float32 [n, F]; for time series [n, T, 3 F] (values, masks, days since the last measurement).
        y: float32 [n], 0 or 1.
        users: int64 [n], the owner of each row: a number that depends on the owner alone (`owners`). All different if
            the unit is a record.
        scaling: "public" if the features were scaled by publicly known bounds, "private" if by statistics of the rows.
        unit: what an owner is.
        population: about how many owners the table has, as it is publicly known; None if nobody stated it.
    """

    name: str
    x: NDArray[np.float32]
    y: NDArray[np.float32]
    users: NDArray[np.int64]
    scaling: Scaling = "public"
    unit: Unit = "record"
    population: int | None = None

    def __post_init__(self) -> None:
        if not len(self.x) == len(self.y) == len(self.users):
            raise DataError(f"{self.name}: features, targets and users have different numbers of rows")
        if len(np.unique(self.y)) != 2 or not set(np.unique(self.y)) <= {0.0, 1.0}:
            raise DataError(f"{self.name}: the target must be 0 in some rows and 1 in others")
        if not np.isfinite(self.x).all():
            raise DataError(f"{self.name}: a feature is missing or not finite; fill or drop those rows first")

    @property
    def features(self) -> int:
        """F, the number of features; for time series, the number of variables."""
        return int(self.x.shape[-1]) // (3 if self.series else 1)

    @property
    def stated_population(self) -> int:
        """The number of owners that was stated.

        Raises:
            DataError: none was. It is public, so it is never counted.
        """
        if self.population is None:
            raise DataError(f"table {self.name}: {UNSTATED}")
        return self.population

    @property
    def series(self) -> bool:
        """Whether rows are time series."""
        return self.x.ndim == 3

    def rows(self, chosen: NDArray[np.int64] | NDArray[np.bool_]) -> "Table":
        return replace(self, x=self.x[chosen], y=self.y[chosen], users=self.users[chosen])


@dataclass(frozen=True, eq=False)
class TableSplit:
    """Holds tables that share no users."""

    train: Table
    validation: Table
    test: Table


def split(table: Table, seed: int = 0, fractions: Sequence[float] = FRACTIONS) -> TableSplit:
    """Assigns users, with all of their rows, randomly to training, validation and test.

    Each has the same fractions of users with a positive row, and of users without one.

    Raises:
        DataError: a split has no rows, or only one value of the target.
    """
    rng, positive = np.random.default_rng(seed), np.unique(table.users[table.y == 1])
    strata = [rng.permutation(owners) for owners in (positive, np.setdiff1d(table.users, positive))]
    cuts = [np.split(own, np.floor(np.cumsum(fractions)[:-1] * len(own)).astype(int)) for own in strata]
    tables = (table.rows(np.isin(table.users, np.concatenate(part))) for part in zip(*cuts, strict=True))
    return TableSplit(*(_fraction(part, fraction) for part, fraction in zip(tables, fractions, strict=True)))


def _fraction(part: Table, fraction: float) -> Table:
    stated = part.population
    return part if stated is None else replace(part, population=max(1, round(fraction * stated)))


def owners(users: Iterable[str]) -> NDArray[np.int64]:
    """Returns a number for each user, int64 [n]: a hash, so that no user changes the number of another one."""
    digests = (hashlib.sha256(user.encode()).digest()[:8] for user in users)
    return np.array([int.from_bytes(digest, signed=True) for digest in digests], dtype=np.int64)


def save_npz(table: Table, path: Path) -> None:
    """Writes a table to a file for `read_npz`."""
    with path.open("wb") as file:
        np.savez_compressed(
            file, x=table.x, y=table.y, users=table.users, scaling=np.str_(table.scaling), unit=np.str_(table.unit)
        )


def read_npz(path: Path) -> Table:
    """Reads a table that `save_npz` wrote.

    Raises:
        DataError: the file is not such a table.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            scaling, unit = str(arrays["scaling"]), str(arrays["unit"])
            if scaling not in get_args(Scaling) or unit not in get_args(Unit):
                raise ValueError("its scaling or unit is unknown")
            return Table(path.stem, arrays["x"], arrays["y"], arrays["users"], scaling, unit)  # type: ignore[arg-type]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: is not a table of `heads prepare`: {error}") from error
