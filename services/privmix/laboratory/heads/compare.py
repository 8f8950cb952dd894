"""Compares all methods on one split of a table, at several epsilons and with several seeds."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from privmix.foundation.progress import Display
from privmix.foundation.units import Unit
from privmix.laboratory.heads import methods
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.models import auc, predictions
from privmix.laboratory.heads.names import MethodName
from privmix.laboratory.heads.table import Table, TableSplit, split

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Cell:
    """Holds the results of one method at one epsilon.

    Attributes:
        name: the method.
        epsilon: the method's epsilon; 0 if it has none.
        auc: the median over seeds of the median area over samples, on the test rows.
        quantiles: the 5, 25, 50, 75 and 95 % quantiles of the areas of all samples and seeds.
        seconds: the median duration of a training.
    """

    name: MethodName
    epsilon: float
    auc: float
    quantiles: Sequence[float]
    seconds: float


@dataclass(frozen=True)
class HeadComparison:
    """Holds all results on one data set.

    Attributes:
        dataset: the name of the table.
        rows: the number of rows for training.
        unit: what a guarantee protects.
        guarantees: the guarantee of each method on this table, in words.
        cells: the results.
        left_out: why a method could not train on the table, by its name.
    """

    dataset: str
    rows: int
    unit: Unit
    guarantees: Mapping[MethodName, str]
    cells: Sequence[Cell]
    left_out: Mapping[MethodName, str]

    def record(self) -> dict[str, Any]:
        """Returns the comparison as JSON data, with the fraction of the non-private area that each cell keeps."""
        reference = next((cell.auc for cell in self.cells if cell.name == "non-private"), None)
        cells = [asdict(cell) | {"kept": None if reference is None else cell.auc / reference} for cell in self.cells]
        return asdict(self) | {"cells": cells}


def compare(
    table: Table,
    display: Display,
    epsilons: Sequence[float],
    names: Sequence[MethodName] = tuple(METHODS),
    seeds: int = 3,
) -> HeadComparison:
    """Trains each method with the settings chosen in advance, at each epsilon if it has one."""
    left_out = {name: reason for name in names if (reason := METHODS[name].unfit(table)) is not None}
    for name, reason in left_out.items():
        display.say(f"{METHODS[name].label} is left out: {reason}")
    fit = [name for name in names if name not in left_out]
    places = [(name, epsilon) for name in fit for epsilon in (epsilons if METHODS[name].private else (0.0,))]
    parts, cells = split(table), []
    for number, (name, epsilon) in enumerate(places, start=1):
        cells.append(_cell(name, epsilon, parts, seeds))
        display.show({"methods and epsilons": number / len(places)})
    guarantees = {name: methods.guarantee(name, table) for name in fit}
    return HeadComparison(table.name, len(parts.train.x), table.unit, guarantees, cells, left_out)


def _cell(name: MethodName, epsilon: float, parts: TableSplit, seeds: int) -> Cell:
    areas, seconds = zip(*(_trained(name, epsilon, parts, seed) for seed in range(seeds)), strict=True)
    return Cell(
        name,
        epsilon,
        float(np.median([np.median(own) for own in areas])),
        np.quantile(np.concatenate(areas), _QUANTILES).tolist(),
        float(np.median(seconds)),
    )


def _trained(name: MethodName, epsilon: float, parts: TableSplit, seed: int) -> tuple[list[float], float]:
    """Returns the areas of a training's samples on the test rows, and its duration in seconds."""
    started = time.perf_counter()
    try:
        thetas = METHODS[name].release(parts.train, epsilon, seed)
    except ValueError:  # the fit diverged, or no noise suffices: the setting is useless at this epsilon
        return [0.5], time.perf_counter() - started
    seconds = time.perf_counter() - started
    return auc(predictions(methods.built(parts.train), thetas, parts.test.x), parts.test.y).tolist(), seconds
