"""Compares all methods on the same splits: a first and a refined search, then a final round with several seeds.

Every training is a Ray task whose result is stored in a file, so an interrupted comparison can continue.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import BaseModel

from privmix.foundation.errors import InputError
from privmix.foundation.files import write_atomically
from privmix.foundation.progress import Display
from privmix.foundation.units import Unit
from privmix.laboratory.heads import methods
from privmix.laboratory.heads.methods import METHODS, Method
from privmix.laboratory.heads.names import MethodName
from privmix.laboratory.heads.score import auc_of, outputs
from privmix.laboratory.heads.table import Scaling, Table, TableSplit, fingerprint, split

EPSILONS = (1e-4, 1e-3, 0.01, 0.1, 0.5, 1.0, 2.0, 3.5, 5.0, 7.0, 10.0)
QUICK_EPSILONS = (1e-3, 0.1, 1.0, 10.0)

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class HeadPlan:
    """Lists what to train.

    Attributes:
        epsilons: the epsilons of the private methods.
        names: the methods.
        seeds: the number of seeds in the final round.
        search: whether to search settings too; otherwise only the settings chosen in advance are trained.
    """

    epsilons: Sequence[float] = EPSILONS
    names: Sequence[MethodName] = tuple(METHODS)
    seeds: int = 10
    search: bool = True


@dataclass(frozen=True)
class HeadTrial:
    """Describes one training: a method, an epsilon, settings and a seed."""

    name: MethodName
    epsilon: float
    settings: Mapping[str, Any]
    seed: int
    final: bool

    @property
    def key(self) -> str:
        """The name of the result's file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Cell:
    """Holds the results of one method at one epsilon.

    Attributes:
        name: the method.
        epsilon: the method's epsilon; 0 if it has none.
        chosen: how the setting was chosen: ``advance`` or ``search``.
        settings: the setting.
        auc: the median over seeds of the median area over samples, on the test rows.
        quantiles: the 5, 25, 50, 75 and 95 % quantiles of the areas of all samples and seeds.
        seconds: the median duration of a training.
        trials: the number of trainings in the search, this one included.
        search_cost: the privacy cost of the search, in words.
        curve: false- and true-positive rates of the training with the median area, with a band over samples.
    """

    name: MethodName
    epsilon: float
    chosen: str
    settings: Mapping[str, Any]
    auc: float
    quantiles: Sequence[float]
    seconds: float
    trials: int
    search_cost: str
    curve: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class HeadComparison:
    """Holds all results on one data set.

    Attributes:
        dataset: the name of the table.
        rows: the number of rows for training.
        unit: what a guarantee protects.
        scaling: whether the features were scaled by public bounds or by the rows.
        cells: the results.
        left_out: why a method could not train on the table, by its name.
    """

    dataset: str
    rows: int
    unit: Unit
    scaling: Scaling
    cells: Sequence[Cell]
    left_out: Mapping[MethodName, str]

    def find(self, name: MethodName, epsilon: float = 0.0, chosen: str = "advance") -> Cell | None:
        """Returns the cell of a method at an epsilon; None if there is none."""
        key = (name, epsilon, chosen)
        return next((cell for cell in self.cells if (cell.name, cell.epsilon, cell.chosen) == key), None)

    def guarantee(self, name: MethodName) -> str:
        """Returns the guarantee of a method on this table, in words."""
        return methods.guarantee(name, self.scaling)

    def record(self) -> dict[str, Any]:
        """Returns the JSON output: areas by method and epsilon (of the search, if there was one) and guarantees."""
        best = "search" if any(cell.chosen == "search" for cell in self.cells) else "advance"
        areas: dict[MethodName, Any] = {}
        for cell in self.cells:
            if cell.chosen != best:
                continue
            if cell.epsilon:
                areas.setdefault(cell.name, {})[f"{cell.epsilon:g}"] = round(cell.auc, 4)
            else:
                areas[cell.name] = round(cell.auc, 4)
        return {
            "dataset": self.dataset,
            "rows": self.rows,
            "unit": self.unit,
            "settings": best,
            "auc": areas,
            "guarantee": {name: self.guarantee(name) for name in areas},
            "left_out": dict(self.left_out),
            "kept": kept(self, best),
            "cells": [asdict(cell) for cell in self.cells],
        }


def kept(comparison: HeadComparison, chosen: str) -> dict[str, dict[str, float]]:
    """Returns the fraction of the non-private area that each private method keeps, by epsilon."""
    reference = comparison.find("non-private", chosen=chosen)
    if reference is None:
        return {}
    fractions: dict[str, dict[str, float]] = {}
    for cell in comparison.cells:
        if cell.epsilon and cell.chosen == chosen:
            fractions.setdefault(cell.name, {})[f"{cell.epsilon:g}"] = round(cell.auc / reference.auc, 4)
    return fractions


# Runs trials and yields each with its result.
Run = Callable[[Mapping[str, tuple[Any, ...]]], Iterator[tuple[str, dict[str, Any]]]]


def compare(table: Table, plan: HeadPlan, output: Path, run: Run, display: Display) -> HeadComparison:
    """Runs all trainings of a plan and stores their results below `output`.

    Raises:
        InputError: the directory holds results of another table.
    """
    left_out = {name: reason for name in plan.names if (reason := METHODS[name].unfit(table)) is not None}
    plan = replace(plan, names=[name for name in plan.names if name not in left_out])
    for name, reason in left_out.items():
        display.say(f"{METHODS[name].label} is left out: {reason}")
    parts = split(table)
    cache = _Cache(output, table)
    cells: list[Cell] = []
    rows = len(parts.train.x)
    for stage in ("advance", "search") if plan.search else ("advance",):
        settings = _chosen(plan, stage, parts, cache, run, display)
        finals = {
            place: [HeadTrial(place[0], place[1], setting.model_dump(), seed, True) for seed in range(plan.seeds)]
            for place, (setting, _) in settings.items()
        }
        display.say(f"Final round, settings of the {stage}: {sum(map(len, finals.values()))} trainings")
        results = cache.results([trial for trials in finals.values() for trial in trials], parts, run)
        for place, (setting, trials) in settings.items():
            cells.append(_cell(place, stage, setting, [results[trial.key] for trial in finals[place]], trials))
    return HeadComparison(table.name, rows, table.unit, table.scaling, cells, left_out)


def run_trial(trial: HeadTrial, parts: TableSplit) -> dict[str, Any]:
    """Runs one training; returns areas on the validation rows, or in the final round on the test rows with a curve."""
    method = METHODS[trial.name]
    make = methods.build(parts.train)
    settings = type(method.advance).model_validate(trial.settings)
    started = time.perf_counter()
    try:
        thetas = method.train(make, parts.train, trial.epsilon, settings, trial.seed)
    except ValueError as error:  # the fit diverged, or no noise suffices: the setting is useless at this epsilon
        return {"auc": [0.5], "seconds": time.perf_counter() - started, "problem": str(error)}
    seconds = time.perf_counter() - started
    table = parts.test if trial.final else parts.validation
    model = methods.parametrised(parts.train)
    areas = auc_of(model, thetas, table)
    result = {"auc": areas.tolist() if trial.final else [float(np.median(areas))], "seconds": seconds}
    if trial.final:
        result["curve"] = _curve(outputs(model, thetas[: min(len(thetas), 50)], table), table)
    return result


def _chosen(
    plan: HeadPlan, stage: str, parts: TableSplit, cache: "_Cache", run: Run, display: Display
) -> dict[tuple[MethodName, float], tuple[BaseModel, int]]:
    """Returns for each method and epsilon its setting, and the number of trainings that the choice took."""
    places = [
        (name, epsilon) for name in plan.names for epsilon in (plan.epsilons if METHODS[name].private else (0.0,))
    ]
    if stage == "advance":
        return {place: (METHODS[place[0]].advance, 1) for place in places}
    display.say("First search")
    tried = {place: list(METHODS[place[0]].grid) for place in places}
    best = _best(tried, parts, cache, run)
    display.say("Refined search")
    for place in places:
        tried[place] = [best[place], *METHODS[place[0]].refine(best[place])]
    refined = _best(tried, parts, cache, run)
    counts = {place: len(METHODS[place[0]].grid) + len(tried[place]) - 1 for place in places}
    return {place: (refined[place], counts[place]) for place in places}


def _best(
    tried: Mapping[tuple[MethodName, float], Sequence[BaseModel]], parts: TableSplit, cache: "_Cache", run: Run
) -> dict[tuple[MethodName, float], BaseModel]:
    trials = {
        place: [HeadTrial(place[0], place[1], setting.model_dump(), 0, False) for setting in settings]
        for place, settings in tried.items()
    }
    results = cache.results([trial for place_trials in trials.values() for trial in place_trials], parts, run)
    return {
        place: tried[place][int(np.argmax([results[trial.key]["auc"][0] for trial in trials[place]]))]
        for place in tried
    }


def _cell(
    place: tuple[MethodName, float],
    stage: str,
    settings: BaseModel,
    results: Sequence[Mapping[str, Any]],
    trials: int,
) -> Cell:
    method: Method = METHODS[place[0]]
    areas = np.concatenate([result["auc"] for result in results])
    typical = sorted(results, key=lambda result: median(result["auc"]))[len(results) // 2]
    return Cell(
        place[0],
        place[1],
        stage,
        settings.model_dump(),
        float(median(median(result["auc"]) for result in results)),
        np.quantile(areas, _QUANTILES).tolist(),
        float(median(result["seconds"] for result in results)),
        trials,
        methods.search_cost(method, place[1], trials if stage == "search" else 1),
        typical.get("curve", {}),
    )


def _curve(scores: "np.typing.NDArray[np.float64]", table: Table) -> dict[str, list[float]]:
    """Computes true-positive rates at fixed false-positive rates: the median over samples and a 90 % band."""
    rates = np.geomspace(1e-3, 1.0, 40)
    positive = table.y == 1
    true_positives = []
    for row in scores:
        thresholds = np.quantile(row[~positive], 1 - rates)
        true_positives.append((row[positive][None] >= thresholds[:, None]).mean(axis=1))
    low, middle, high = np.quantile(np.array(true_positives), [0.05, 0.5, 0.95], axis=0)
    return {"rates": rates.tolist(), "low": low.tolist(), "median": middle.tolist(), "high": high.tolist()}


class _Cache:
    """Stores the result of each training in a file. Refuses a directory with results of another table."""

    def __init__(self, output: Path, table: Table) -> None:
        self._directory = output / "trials"
        self._directory.mkdir(parents=True, exist_ok=True)
        mark, own = self._directory / "data", fingerprint(table).encode()
        if mark.exists() and mark.read_bytes() != own:
            raise InputError(f"output {output}: contains results of another table; choose another directory")
        write_atomically(mark, own)

    def results(self, trials: Sequence[HeadTrial], parts: TableSplit, run: Run) -> dict[str, dict[str, Any]]:
        """Runs the trials without a stored result and returns all results by key."""
        stored = {trial.key: self._read(trial) for trial in trials}
        missing = {trial.key: (trial, parts) for trial in trials if stored[trial.key] is None}
        for key, result in run(missing):
            write_atomically(self._directory / f"{key}.json", json.dumps(result).encode())
            stored[key] = result
        return {key: result for key, result in stored.items() if result is not None}

    def _read(self, trial: HeadTrial) -> dict[str, Any] | None:
        try:
            result: dict[str, Any] = json.loads((self._directory / f"{trial.key}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return result


def in_process(display: Display) -> Run:
    """Returns a function that runs trials one after another in this process."""

    def run(jobs: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, (key, (trial, parts)) in enumerate(jobs.items(), start=1):
            yield key, run_trial(trial, parts)
            display.show({"trainings": number / len(jobs)})

    return run


def on_cluster(display: Display) -> Run:
    """Returns a function that runs trials as Ray tasks on the connected cluster, with one core for each."""
    import ray

    from privmix.foundation.fan_out import run_as_ray_tasks

    stored: dict[int, Any] = {}

    def run(jobs: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, dict[str, Any]]]:
        batches: dict[str, tuple[Any, ...]] = {}
        keys = list(jobs)
        for first in range(0, len(keys), _TRIALS_PER_TASK):
            chosen = keys[first : first + _TRIALS_PER_TASK]
            parts = jobs[chosen[0]][1]
            if id(parts) not in stored:
                stored[id(parts)] = ray.put(parts)
            batches[f"trainings {first}"] = ([(key, jobs[key][0]) for key in chosen], stored[id(parts)])
        for _, results in run_as_ray_tasks(_run_batch, batches, display):
            yield from results

    return run


# Several trials share a task, because a task takes as long to start as a short training.
_TRIALS_PER_TASK = 4


def _run_batch(trials: Sequence[tuple[str, HeadTrial]], parts: TableSplit) -> list[tuple[str, dict[str, Any]]]:
    return [(key, run_trial(trial, parts)) for key, trial in trials]
