"""Compares all methods on one split of a table, at several epsilons and with several seeds."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from privmix.foundation.progress import Display
from privmix.laboratory.heads import MethodName, methods
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.models import auc, predictions
from privmix.laboratory.heads.table import Table, TableSplit, split

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def compare(
    table: Table,
    display: Display,
    epsilons: Sequence[float],
    names: Sequence[MethodName] = tuple(METHODS),
    seeds: int = 3,
) -> dict[str, Any]:
    """Trains each method with the settings chosen in advance, at each epsilon if it has one.

    Returns:
        JSON data: the table and its number of rows for training; in `left_out`, why a method cannot train on it; and
        `cells` with the median area over seeds of the median over samples, on the test rows, its quantiles over all of
        them, the median seconds of a training, and the fraction `kept` of the area without privacy.
    """
    left_out = {name: reason for name in names if (reason := METHODS[name].unfit(table)) is not None}
    for name, reason in left_out.items():
        display.say(f"{METHODS[name].label} is left out: {reason}")
    fit = [name for name in names if name not in left_out]
    places = [(name, epsilon) for name in fit for epsilon in (epsilons if METHODS[name].private else (None,))]
    parts, cells = split(table), []
    for number, (name, epsilon) in enumerate(places, start=1):
        cells.append({"method": name, "epsilon": epsilon, **_cell(name, epsilon or 0.0, parts, seeds)})
        display.show({"methods and epsilons": number / len(places)})
    reference = next((cell["auc"] for cell in cells if cell["method"] == "non-private"), None)
    return {
        "dataset": table.name,
        "rows": len(parts.train.x),
        "unit": table.unit,
        "left_out": left_out,
        "guarantees": {name: methods.guarantee(name, table) for name in fit},
        "cells": [{**cell, "kept": None if reference is None else cell["auc"] / reference} for cell in cells],
    }


def _cell(name: MethodName, epsilon: float, parts: TableSplit, seeds: int) -> dict[str, Any]:
    areas, seconds = zip(*(_trained(name, epsilon, parts, seed) for seed in range(seeds)), strict=True)
    return {
        "auc": float(np.median([np.median(own) for own in areas])),
        "quantiles": np.quantile(np.concatenate(areas), _QUANTILES).tolist(),
        "seconds": float(np.median(seconds)),
    }


def _trained(name: MethodName, epsilon: float, parts: TableSplit, seed: int) -> tuple[list[float], float]:
    """Returns the areas of a training's samples on the test rows, and its duration in seconds."""
    started = time.perf_counter()
    try:
        thetas = METHODS[name].release(parts.train, epsilon, seed)
    except ValueError:  # the fit diverged, or no noise suffices: the setting is useless at this epsilon
        return [0.5], time.perf_counter() - started
    seconds = time.perf_counter() - started
    return auc(predictions(methods.built(parts.train), thetas, parts.test.x), parts.test.y).tolist(), seconds
