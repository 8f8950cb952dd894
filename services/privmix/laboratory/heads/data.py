"""Reads tables and time series with a binary target, and scales them by public bounds."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from privmix.foundation.errors import DataError
from privmix.laboratory.heads.table import Table, owners


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
    return replace(_scaled("rand", frame[list(bounds)], target, bounds, None), population=20_190)


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
    return replace(_scaled("breast-cancer", dataset.data, dataset.target.to_numpy(), bounds, None), population=569)


def read_table(source: str, *, target: str, user: str | None = None, bounds: Path | None = None) -> Table:
    """Reads a CSV, Parquet or JSON Lines file, a directory of Hugging Face `datasets`, or a data set from the hub.

    Args:
        source: the file, the directory or the hub id.
        target: the column of the target, with two values: 0 and 1, or two strings or booleans, the greater being 1.
        user: the column of the row's owner; by default each row has its own owner.
        bounds: a JSON file with [low, high] for every feature. By default, features are standardised with the means and
            deviations of the rows, which no guarantee covers.

    Raises:
        DataError: the source cannot be read, or a column is invalid. The message names it.
    """
    frame, y = labelled_rows(source, target, (user,))
    features = frame.drop(columns=[column for column in (target, user) if column is not None])
    for column in features:
        if not pd.api.types.is_numeric_dtype(features[column]):
            raise DataError(f"{source}: column {column!r} is not numeric; encode it or leave it out")
    limits = None if bounds is None else _bounds(bounds, list(features.columns))
    return _scaled(Path(source).stem, features, y, limits, None if user is None else frame[user])


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


DATASETS: Mapping[str, Callable[[], Table]] = {"rand": rand, "breast-cancer": breast_cancer}
"""The built-in data sets."""
