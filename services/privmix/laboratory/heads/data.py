"""Reads tables and time series with a binary target, and scales them by public bounds."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privmix.foundation.errors import DataError
from privmix.foundation.identifiers import identifier
from privmix.foundation.json_lines import BadRow
from privmix.laboratory.heads.table import Table, owners
from privmix.privacy.arrays import Reals
from privmix.training.rows import RowFields, rows
from privmix.training.sources import files


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
    return replace(
        _scaled("rand", list(bounds), frame[list(bounds)].to_numpy(dtype=np.float64), target, bounds, None),
        population=20_190,
    )


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
    values, target = dataset.data.to_numpy(dtype=np.float64), dataset.target.to_numpy(dtype=np.bool_)
    return replace(_scaled("breast-cancer", list(bounds), values, target, bounds, None), population=569)


def read_table(source: str, *, target: str, user: str | None = None, bounds: Path | None = None) -> Table:
    """Reads a CSV, Parquet or JSON Lines file.

    Each value is read alone. A type that is guessed from a whole column would let one row change the others.

    Args:
        source: the file.
        target: the column of the target, with two values: 0 and 1, or two strings or booleans, the greater being 1.
        user: the column of the row's owner (`privmix.foundation.identifiers`); by default each row has its own owner.
        bounds: a JSON file with [low, high] for every feature. By default, features are standardised with the means and
            deviations of the rows, which no guarantee covers.

    Raises:
        InputError: the source cannot be read, or a value is missing or invalid. The message names the column.
    """
    rows = list(_rows(source, (target,) if user is None else (user, target)))
    names = list(rows[0][1]) if rows else []
    for column in (target, user):
        if column is not None and column not in names:
            raise DataError(f"{source}: has no column {column!r}; it has {', '.join(names)}")
    features = [name for name in names if name not in (target, user)]
    values = np.array([[_number(row, name, f"{source}, {place}") for name in features] for place, row in rows])
    owner = None if user is None else owners(_owner(row, user, f"{source}, {place}") for place, row in rows)
    limits = None if bounds is None else _bounds(bounds, features)
    y = _greater([row.get(target) for _, row in rows], f"{source}: column {target!r}")
    return _scaled(Path(source).stem, features, values, y, limits, owner)


def _rows(source: str, needed: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in files([source]):
        for place, row in rows(file, RowFields(needed, None)):
            if isinstance(row, BadRow):
                raise DataError(f"{source}, {place}: {row.kind}; {row.fix}")
            yield place, row


def _owner(row: Mapping[str, Any], column: str, place: str) -> str:
    try:
        return identifier(row.get(column), column)
    except BadRow as bad:
        raise DataError(f"{place}: {bad.kind}; {bad.fix}") from None


def _number(row: Mapping[str, Any], column: str, place: str) -> float:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{place}: column {column!r} is not numeric; encode it or leave it out") from None


def _greater(values: Sequence[Any], column: str) -> NDArray[np.bool_]:
    """Returns whether each value is the greater one of two."""
    try:
        values = [float(value) for value in values]
    except (TypeError, ValueError):
        values = ["" if value is None else str(value) for value in values]
    distinct = set(values)
    if len(distinct) != 2 or "" in distinct:
        raise DataError(f"{column} must have two values and none missing, it has {len(distinct - {''})}")
    return np.array([value == max(distinct) for value in values])


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
    features: Sequence[str],
    values: Reals,
    target: NDArray[np.bool_],
    bounds: Mapping[str, tuple[float, float]] | None,
    users: NDArray[np.int64] | None,
) -> Table:
    """Scales features to [-1, 1] by their bounds; without bounds, standardises them with statistics of the rows."""
    if bounds is None:
        deviation = values.std(axis=0)
        scaled = (values - values.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    else:
        low, high = np.array([bounds[feature] for feature in features]).T
        scaled = np.clip(2 * (values - low) / (high - low) - 1, -1.0, 1.0)
    return Table(
        name,
        scaled.astype(np.float32),
        target.astype(np.float32),
        np.arange(len(values)) if users is None else users,
        "private" if bounds is None else "public",
        "record" if users is None else "user",
    )


DATASETS: Mapping[str, Callable[[], Table]] = {"rand": rand, "breast-cancer": breast_cancer}
"""The built-in data sets."""
