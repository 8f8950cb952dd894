"""Writes the measurements of a task as JSON and as one self-contained HTML page, for the operator only."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from privmix.foundation.files import write_atomically
from privmix.laboratory import html_report
from privmix.laboratory.evaluation.figures import PALETTES, Palette, Theme
from privmix.laboratory.utility.classifiers import CLASSIFIERS, Score
from privmix.laboratory.utility.task import REAL, TaskReport, UtilityRow

JSON_FILE, HTML_FILE = "task-operator.json", "task-operator.html"

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_ROW_HEIGHT = 0.42  # inches


def write_report(report: TaskReport, output: Path) -> Path:
    """Writes both files, each atomically; returns the page's path."""
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / JSON_FILE, json.dumps(report.record(), indent=2).encode() + b"\n")
    write_atomically(output / HTML_FILE, render(report).encode())
    return output / HTML_FILE


def render(report: TaskReport) -> str:
    """Renders the HTML page with embedded figures. It quotes no text."""
    figures: dict[str, Callable[[TaskReport, Palette], Figure]] = {"scores": _scores_figure, "copies": _copies_figure}
    return html_report.render(
        _TEMPLATE,
        report=report,
        real=REAL,
        classifiers=tuple(CLASSIFIERS),
        guarantee=guarantee,
        shown=shown,
        pictures={
            name: {theme: html_report.picture(draw(report, PALETTES[theme])) for theme in _themes()}
            for name, draw in figures.items()
        },
    )


def guarantee(row: UtilityRow) -> str:
    """Returns the guarantee of a row's texts in a few words."""
    origin = row.origin
    if row.name == REAL:
        return "none: the private text"
    if origin.protocol is None:
        return "not stated"
    if origin.epsilon is None:
        return f"{origin.protocol}: no epsilon"
    return f"{origin.protocol}: epsilon {origin.epsilon:g}, delta {origin.delta:g}"


def shown(score: Score, sign: str = "-") -> str:
    """Returns a score in per cent with its interval; with the sign `+`, a difference in points."""
    mean, low, high = (f"{100 * value:{sign}.1f}" for value in (score.mean, score.low, score.high))
    return f"{mean} ({low} to {high})"


def _themes() -> Sequence[Theme]:
    return tuple(PALETTES)


def _scores_figure(report: TaskReport, palette: Palette) -> Figure:
    figure = _figure(palette, 1.5 + _ROW_HEIGHT * len(report.rows))
    for axes, quantity in zip(figure.subplots(1, 2, sharey=True), ("accuracy", "macro_f1"), strict=True):
        for index, name in enumerate(CLASSIFIERS):
            scores: list[Score] = [getattr(row.scores[name], quantity) for row in report.rows]
            means = np.array([100 * score.mean for score in scores])
            ends = np.array([[100 * score.low for score in scores], [100 * score.high for score in scores]])
            axes.errorbar(
                means,
                np.arange(len(scores)) + 0.2 * index - 0.1,
                xerr=np.abs(ends - means),
                fmt="os"[index],
                color=palette.lines[index],
                label=name if quantity == "accuracy" else None,
            )
        axes.set_xlabel(f"{'accuracy' if quantity == 'accuracy' else 'macro-F1'} on held-out real text, in %")
        axes.set_yticks(range(len(report.rows)), [row.name for row in report.rows])
        axes.set_ylim(len(report.rows) - 0.5, -0.5)
        if quantity == "accuracy":
            axes.axvline(100 * report.majority, color=palette.muted, linestyle=":", label="most frequent class")
        _style(axes, palette)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=palette.ink)
    return figure


def _copies_figure(report: TaskReport, palette: Palette) -> Figure:
    """Draws, for each set, the fraction of its texts with a copied span of at least so many tokens."""
    figure = _figure(palette, 3.6)
    axes = figure.subplots()
    lengths = np.arange(max(row.copies.longest for row in report.rows) + 2)
    for index, row in enumerate(report.rows):
        fractions = [100 * np.mean(np.array(row.copies.spans) >= length) for length in lengths]
        name = "held-out people, by chance" if row.name == REAL else row.name
        style = "-" if index < len(palette.lines) else "--"
        axes.step(
            lengths, fractions, where="post", color=palette.lines[index % len(palette.lines)], ls=style, label=name
        )
    axes.set_xlabel("tokens of the longest span that is also in a private text")
    axes.set_ylabel("texts with such a span, in %")
    _style(axes, palette)
    figure.legend(loc="outside right upper", frameon=False, labelcolor=palette.ink)
    return figure


def _figure(palette: Palette, height: float) -> Figure:
    return Figure(figsize=(9, height), layout="constrained", facecolor=palette.paper)


def _style(axes: Axes, palette: Palette) -> None:
    axes.set_facecolor(palette.paper)
    axes.tick_params(colors=palette.muted)
    axes.grid(axis="x", color=palette.rule)
    for side in axes.spines.values():
        side.set_color(palette.rule)
    for label in (axes.xaxis.label, axes.yaxis.label, *axes.get_yticklabels()):
        label.set_color(palette.ink)
