"""Writes an evaluation as JSON and as one plot of the perplexities."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from privmix.foundation.files import write_atomically
from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.methods import number
from privmix.laboratory.evaluation.results import Evaluation
from privmix.training.options import TokenBudget

JSON_FILE, PLOT_FILE = "evaluation.json", "perplexity.png"

Points = Sequence[tuple[str | None, Estimate]]
"""The perplexities of one method, each with its value of the sweep."""


def write_report(evaluation: Evaluation, output: Path) -> tuple[Path, Path]:
    """Writes both files, each atomically; returns the paths of the JSON and of the plot."""
    content = json.dumps(record(evaluation), indent=2, allow_nan=False).encode() + b"\n"
    write_atomically(output / JSON_FILE, content)
    write_atomically(output / PLOT_FILE, plot(evaluation))
    return output / JSON_FILE, output / PLOT_FILE


def record(evaluation: Evaluation) -> dict[str, Any]:
    """Returns the JSON output. Infinite numbers become "infinite", because JSON cannot represent them."""
    content: dict[str, Any] = {"model": evaluation.base_model, **_plain(asdict(evaluation))}
    del content["base_model"]
    return content


def plot(evaluation: Evaluation) -> bytes:
    """Draws a PNG of the perplexities with their intervals.

    A sweep over numbers is the horizontal axis, with a line for each method. Else each method has a row, with a mark
    for each value.
    """
    lines = _lines(evaluation)
    values = [table.value for table in evaluation.tables]
    swept = len(values) > 1 and all(number(value) is not None for value in values)
    figure = Figure(figsize=(8, 5) if swept else (8, 1.5 + 0.35 * len(lines)), layout="constrained")
    axes = figure.subplots()
    if swept:
        for name, points in lines.items():
            places = [0.0 if (place := number(value)) is None else place for value, _ in points]
            axes.errorbar(places, _means(points), yerr=_errors(points), fmt="o-", capsize=2, label=name)
        axes.set_xlabel(evaluation.sweep or "")
        axes.set_ylabel("perplexity")
    else:
        for value in values:
            own = {name: [point for point in points if point[0] == value] for name, points in lines.items()}
            rows = [row for row, name in enumerate(lines) if own[name]]
            shown = [point for name in lines for point in own[name]]
            label = None if value is None else f"{evaluation.sweep} {value}"
            axes.errorbar(_means(shown), rows, xerr=_errors(shown), fmt="o", capsize=2, label=label)
        axes.set_yticks(range(len(lines)), list(lines))
        axes.invert_yaxis()
        axes.set_xlabel("perplexity")
    if len(values) > 1:
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize="small")
    axes.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _lines(evaluation: Evaluation) -> Mapping[str, Points]:
    """Returns the finite perplexities of each method on each ensemble. A bound's name says so."""
    several = len({result.ensemble for table in evaluation.tables for result in table.results}) > 1
    lines: dict[str, list[tuple[str | None, Estimate]]] = {}
    for table in evaluation.tables:
        for result in table.results:
            if result.perplexity is not None and math.isfinite(result.perplexity.mean):
                name = result.name + (f" ({result.ensemble})" if several else "")
                name += ", at least" if result.bounded else ""
                lines.setdefault(name, []).append((table.value, result.perplexity))
    return lines


def _means(points: Points) -> list[float]:
    return [estimate.mean for _, estimate in points]


def _errors(points: Points) -> list[list[float]]:
    return [
        [0.0 if estimate.low is None else estimate.mean - estimate.low for _, estimate in points],
        [0.0 if estimate.high is None else estimate.high - estimate.mean for _, estimate in points],
    ]


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
