"""Writes an evaluation as JSON, and a sweep as one plot of the perplexities."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from privmix.foundation.files import write_atomically
from privmix.laboratory.evaluation.methods import number
from privmix.laboratory.evaluation.results import Evaluation
from privmix.training.options import TokenBudget

JSON_FILE, PLOT_FILE = "evaluation.json", "perplexity.png"


def write_report(evaluation: Evaluation, output: Path) -> list[Path]:
    """Writes the JSON and, after a sweep over numbers, the plot, each atomically; returns their paths."""
    content = json.dumps(record(evaluation), indent=2, allow_nan=False).encode() + b"\n"
    files = {output / JSON_FILE: content}
    if all(number(table.value) is not None for table in evaluation.tables):
        files[output / PLOT_FILE] = plot(evaluation)
    (output / PLOT_FILE).unlink(missing_ok=True)  # that of another evaluation
    for path, data in files.items():
        write_atomically(path, data)
    return list(files)


def record(evaluation: Evaluation) -> dict[str, Any]:
    """Returns the JSON output. Infinite numbers become "infinite", because JSON cannot represent them."""
    content: dict[str, Any] = {"model": evaluation.base_model, **_plain(asdict(evaluation))}
    del content["base_model"]
    return content


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


def _plain(value: Any) -> Any:
    match value:
        case TokenBudget():
            return value.model_dump()
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return "infinite"
        case _:
            return value
