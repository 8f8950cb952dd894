"""Reads tables and time series with a binary target, scales them by public bounds, and splits them.

table = rand()
parts = split(table, seed=0)
parts.train.x, parts.train.y
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from services.errors import InputError

Reals = NDArray[np.float64]
Scaling = Literal["public", "private"]

SHARES = (0.7, 0.1, 0.2)
"""The shares of the rows for training, validation and test, as in the paper."""


class DataError(InputError):
    """The data is invalid. The message names the file and the field."""


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
    """

    name: str
    x: NDArray[np.float32]
    y: NDArray[np.float32]
    users: NDArray[np.int64]
    scaling: Scaling = "public"
    unit: Literal["record", "user"] = "record"

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
    def series(self) -> bool:
        """Whether rows are time series."""
        return self.x.ndim == 3

    def rows(self, chosen: NDArray[np.int64] | NDArray[np.bool_]) -> "Table":
        """Returns a table of the chosen rows."""
        return replace(self, x=self.x[chosen], y=self.y[chosen], users=self.users[chosen])


@dataclass(frozen=True, eq=False)
class Split:
    """Holds tables that share no users."""

    train: Table
    validation: Table
    test: Table


def split(table: Table, seed: int = 0, shares: Sequence[float] = SHARES) -> Split:
    """Assigns users, with all of their rows, randomly to training, validation and test.

    Raises:
        DataError: a split has no rows, or only one value of the target.
    """
    owners = np.unique(table.users)
    order = np.random.default_rng(seed).permutation(owners)
    edges = np.floor(np.cumsum(shares)[:-1] * len(order)).astype(int)
    return Split(*(table.rows(np.isin(table.users, part)) for part in np.split(order, edges)))


def rand() -> Table:
    """Loads the RAND Health Insurance Experiment from statsmodels: 20,190 rows, did the person see a doctor that year?

    The bounds come from the questionnaire and the insurance plans, not from the rows. A row is one person in one year.
    The published table does not identify persons, so the unit is a row.
    """
    from statsmodels.datasets import randhie

    frame = randhie.load_pandas().data
    bounds = {
        "lncoins": (0.0, float(np.log(101))),
        "idp": (0.0, 1.0),
        "lpi": (0.0, 8.0),
        "fmde": (0.0, 9.0),
        "physlm": (0.0, 1.0),
        "disea": (0.0, 30.0),
        "hlthg": (0.0, 1.0),
        "hlthf": (0.0, 1.0),
        "hlthp": (0.0, 1.0),
    }
    target = frame["mdvis"].to_numpy() > 0
    return _scaled("rand", frame[list(bounds)], target, bounds, None)


def breast_cancer() -> Table:
    """Loads Wisconsin breast cancer from scikit-learn: 569 rows, malignant or benign. Scales have public bounds."""
    from sklearn.datasets import load_breast_cancer

    dataset = load_breast_cancer(as_frame=True)
    high = {
        "radius": 40, "texture": 50, "perimeter": 270, "area": 4500, "smoothness": 0.25, "compactness": 1.2,
        "concavity": 1.4, "concave points": 0.35, "symmetry": 0.7, "fractal dimension": 0.25,
    }  # fmt: skip
    errors = {
        "radius": 3, "texture": 5, "perimeter": 25, "area": 600, "smoothness": 0.04, "compactness": 0.15,
        "concavity": 0.4, "concave points": 0.06, "symmetry": 0.08, "fractal dimension": 0.03,
    }  # fmt: skip
    bounds = {}
    for column in dataset.data.columns:
        name = column.removeprefix("mean ").removeprefix("worst ").removesuffix(" error")
        bounds[column] = (0.0, float((errors if column.endswith(" error") else high)[name]))
    return _scaled("breast-cancer", dataset.data, dataset.target.to_numpy(), bounds, None)


def read_table(
    source: str, *, target: str, user: str | None = None, bounds: Path | None = None, name: str | None = None
) -> Table:
    """Reads a CSV, Parquet or JSON Lines file, a directory of Hugging Face `datasets`, or a data set from the hub.

    Args:
        source: the file, the directory or the hub id.
        target: the column of the target, with two values: 0 and 1, or two strings or booleans, the greater being 1.
        user: the column of the row's owner; by default each row has its own owner.
        bounds: a JSON file with [low, high] for every feature. By default, features are standardised with the means and
            deviations of the rows, which no guarantee covers.
        name: the name of the table; by default the source's.

    Raises:
        DataError: the source cannot be read, or a column is invalid. The message names it.
    """
    frame, y = labelled_rows(source, target, (user,))
    features = frame.drop(columns=[column for column in (target, user) if column is not None])
    for column in features:
        if not pd.api.types.is_numeric_dtype(features[column]):
            raise DataError(f"{source}: column {column!r} is not numeric; encode it or leave it out")
    limits = None if bounds is None else _bounds(bounds, list(features.columns))
    return _scaled(name or Path(source).stem, features, y, limits, None if user is None else frame[user])


def labelled_rows(
    source: str, target: str, columns: Sequence[str | None] = ()
) -> tuple[pd.DataFrame, NDArray[np.bool_]]:
    """Reads the rows of a source, and whether the target has the greater of its two values in each.

    Args:
        columns: further columns that the source must have; None is ignored.

    Raises:
        DataError: the source cannot be read, a column is missing, or the target has not two values.
    """
    frame = _read(source)
    for column in (target, *columns):
        if column is not None and column not in frame:
            raise DataError(f"{source}: has no column {column!r}; it has {', '.join(map(str, frame.columns))}")
    values = frame[target].dropna().unique()
    if len(values) != 2 or frame[target].isna().any():
        raise DataError(f"{source}: column {target!r} must have two values and none missing, it has {len(values)}")
    return frame, (frame[target] == max(values)).to_numpy()


def _read(source: str) -> pd.DataFrame:
    path = Path(source)
    try:
        if path.suffix == ".jsonl":
            return pd.read_json(path, lines=True)
        if path.suffix == ".csv":
            return pd.read_csv(path)
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        import datasets

        dataset = datasets.load_from_disk(source) if path.is_dir() else datasets.load_dataset(source, split="train")
        return dataset["train"].to_pandas() if isinstance(dataset, datasets.DatasetDict) else dataset.to_pandas()
    # The reader of each format raises its own error types.
    except Exception as error:
        raise DataError(
            f"{source}: cannot be read ({type(error).__name__}: {error}); give a .csv, .parquet or .jsonl file, a "
            "directory of Hugging Face datasets, or the id of one on the hub"
        ) from error


def _bounds(path: Path, columns: Sequence[str]) -> Mapping[str, tuple[float, float]]:
    try:
        content = json.loads(path.read_bytes())
        limits = {column: (float(content[column][0]), float(content[column][1])) for column in columns}
    except KeyError as error:
        raise DataError(f"{path}: has no bounds for column {error}") from error
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise DataError(f'{path}: must be JSON like {{"age": [0, 120]}}: {error}') from error
    for column, (low, high) in limits.items():
        if not low < high:
            raise DataError(f"{path}: the bounds of {column!r} must be [low, high] with low < high")
    return limits


def _scaled(
    name: str,
    frame: pd.DataFrame,
    target: NDArray[np.bool_],
    bounds: Mapping[str, tuple[float, float]] | None,
    users: "pd.Series[str] | None",
) -> Table:
    """Scales features to [-1, 1] by their bounds; without bounds, standardises them with statistics of the rows."""
    values = frame.to_numpy(dtype=np.float64)
    if bounds is None:
        deviation = values.std(axis=0)
        scaled = (values - values.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    else:
        low, high = np.array([bounds[column] for column in frame.columns]).T
        scaled = np.clip(2 * (values - low) / (high - low) - 1, -1.0, 1.0)
    return Table(
        name,
        scaled.astype(np.float32),
        target.astype(np.float32),
        np.arange(len(frame)) if users is None else owners(users.astype(str)),
        "private" if bounds is None else "public",
        "record" if users is None else "user",
    )


def owners(users: Iterable[str]) -> NDArray[np.int64]:
    """Returns a number for each user, int64 [n]: a hash, so that no user changes the number of another one."""
    digests = (hashlib.sha256(user.encode()).digest()[:8] for user in users)
    return np.array([int.from_bytes(digest, signed=True) for digest in digests], dtype=np.int64)


def fingerprint(table: Table) -> str:
    """Returns the SHA-256 (hexadecimal) of the rows. It depends on private data and must stay private."""
    digest = hashlib.sha256()
    for array in (table.x, table.y, table.users):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


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
            if scaling not in ("public", "private") or unit not in ("record", "user"):
                raise ValueError("its scaling or unit is unknown")
            return Table(path.stem, arrays["x"], arrays["y"], arrays["users"], scaling, unit)  # type: ignore[arg-type]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: is not a table of `heads prepare`: {error}") from error


def _clinic() -> Table:
    from services.laboratory.heads.clinic import clinic

    return clinic()


DATASETS: Mapping[str, Callable[[], Table]] = {"rand": rand, "breast-cancer": breast_cancer, "clinic": _clinic}
"""The built-in data sets: those of libraries and the generated one."""
