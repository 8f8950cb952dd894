"""Writes an evaluation as JSON, and a sweep as one plot of the perplexities."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from pydantic import TypeAdapter

from privmix.foundation.files import write_atomically
from privmix.laboratory.evaluation.methods import number
from privmix.laboratory.evaluation.results import Evaluation

JSON_FILE, PLOT_FILE = "evaluation.json", "perplexity.png"

_RECORD = TypeAdapter(Evaluation)


def write_report(evaluation: Evaluation, output: Path) -> list[Path]:
    """Writes the JSON and, after a sweep over numbers, the plot, each atomically; returns their paths."""
    files = {output / JSON_FILE: record(evaluation)}
    if all(number(table.value) is not None for table in evaluation.tables):
        files[output / PLOT_FILE] = plot(evaluation)
    (output / PLOT_FILE).unlink(missing_ok=True)  # that of another evaluation
    for path, data in files.items():
        write_atomically(path, data)
    return list(files)


def record(evaluation: Evaluation) -> bytes:
    """Returns the JSON output. An infinite number is "Infinity", because JSON cannot represent it."""
    return _RECORD.dump_json(evaluation, indent=2) + b"\n"


def plot(evaluation: Evaluation) -> bytes:
    """Draws a PNG of the perplexities along the sweep, with their intervals: a line for each method and ensemble."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in _lines(evaluation).items():
        values, means, lows, highs = zip(*points, strict=True)
        below, above = np.subtract(means, lows), np.subtract(highs, means)
        axes.errorbar(values, means, yerr=[below, above], fmt="o-", capsize=2, label=name)
    axes.set_xlabel(evaluation.sweep or "")
    axes.set_ylabel("perplexity")
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize="small")
    axes.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _lines(evaluation: Evaluation) -> Mapping[str, Sequence[tuple[float, float, float, float]]]:
    """Returns each method's values of the sweep, finite perplexities and their intervals. A bound's name says so."""
    several = len({result.ensemble for table in evaluation.tables for result in table.results}) > 1
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for table in evaluation.tables:
        for result in table.results:
            if (
                (value := number(table.value)) is None
                or (own := result.perplexity) is None
                or not math.isfinite(own.mean)
            ):
                continue
            name = result.name + (f" ({result.ensemble})" if several else "")
            name += ", at least" if result.bounded else ""
            low, high = (own.mean if end is None else end for end in (own.low, own.high))
            lines.setdefault(name, []).append((value, own.mean, low, high))
    return lines
