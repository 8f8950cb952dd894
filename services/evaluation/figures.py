"""Draws the figures of a report: the perplexity of every method, and its dependence on each swept quantity."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from services.evaluation.estimate import Estimate
from services.evaluation.methods import labels
from services.evaluation.results import Result, SweepPoint, SweepResult, Table
from services.privacy import accounting

Theme = Literal["light", "dark"]


@dataclass(frozen=True)
class Palette:
    """Holds the colours of one theme. Colour-blind people can distinguish `lines` (Okabe & Ito 2008)."""

    ink: str
    muted: str
    rule: str
    paper: str
    lines: tuple[str, ...]


PALETTES: Mapping[Theme, Palette] = {
    "light": Palette(
        "#1d2430",
        "#5b6675",
        "#d9dde3",
        "#ffffff",
        ("#0072b2", "#d55e00", "#009e73", "#b04f8b", "#8a6d00", "#3a3f47", "#4aa8dd", "#8c1c2e"),
    ),
    "dark": Palette(
        "#e8ebf0",
        "#9aa5b4",
        "#343c48",
        "#161b22",
        ("#56b4e9", "#ff9248", "#2fd0a2", "#e39ac6", "#e3c64a", "#c9d1d9", "#9a95f5", "#e06c6c"),
    ),
}
_MARKERS = "osD^vPX*<>"
_AXES = {
    "epsilon": "epsilon of the budget",
    "tokens": "number of tokens that the budget pays for",
    "parts": "parts of the ensemble",
    "q": "probability q with which a part is drawn",
    "order": "Rényi order",
    "radius": "radius c around the public model, in nats",
}
TITLES = {
    "epsilon": "Perplexity by epsilon",
    "tokens": "Perplexity by the number of tokens",
    "parts": "Perplexity by the number of parts",
    "q": "Perplexity by the share of drawn parts",
    "order": "Perplexity by Rényi order",
    "radius": "Perplexity and cost by radius",
}


def overview(tables: Sequence[Table], theme: Theme = "light") -> bytes:
    """Draws a PNG of every method's change in perplexity from the public model's on the same tokens, with intervals."""
    palette = PALETTES[theme]
    labels = [result.label for result in tables[0].results if any(_changed(table, result.label) for table in tables)]
    figure, axes = _canvas(palette, height=1.2 + 0.36 * len(labels))
    axes.axvline(0, color=palette.muted, linewidth=1)
    for index, table in enumerate(tables):
        offset = (index - (len(tables) - 1) / 2) * 0.26
        points = [(y + offset, change) for y, label in enumerate(labels) if (change := _changed(table, label))]
        axes.errorbar(
            [_percent(change.mean) for _, change in points],
            [y for y, _ in points],
            xerr=_errors([change for _, change in points]),
            fmt=_MARKERS[index % len(_MARKERS)],
            color=palette.lines[index % len(palette.lines)],
            markersize=5,
            capsize=2.5,
            elinewidth=1.2,
            label=f"epsilon {accounting.stated(table.budget.epsilon)}",
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("change of the perplexity from the public model's, in %, with 95 % interval")
    axes.grid(axis="y", visible=False)
    _legend(axes, palette)
    return _png(figure)


def sweep(result: SweepResult, theme: Theme = "light") -> bytes:
    """Draws a PNG of perplexity over the quantity: a line for each method, and dashed lines for references."""
    palette = PALETTES[theme]
    with_cost = result.quantity == "radius"
    figure, axes = _canvas(palette, height=6.2 if with_cost else 4.2, rows=2 if with_cost else 1)
    upper: Axes = axes[0] if with_cost else axes
    lines = _lines(result.points)
    for label, points in lines.items():
        _line(upper, palette, label, points)
    values = sorted({point.value for point in result.points})
    for reference in result.references:
        if reference.perplexity and not (result.quantity == "parts" and reference.protocol == "ensemble"):
            upper.axhline(reference.perplexity.mean, color=palette.muted, linestyle=(0, (4, 3)), linewidth=1)
            upper.annotate(
                reference.label,
                (1, reference.perplexity.mean),
                xycoords=("axes fraction", "data"),
                xytext=(-2, 2),
                textcoords="offset points",
                ha="right",
                va="bottom",
                fontsize=8,
                color=palette.muted,
            )
    upper.set_ylabel("perplexity")
    upper.yaxis.set_major_locator(MaxNLocator(6))
    lower = upper
    if with_cost:
        lower = axes[1]
        for label, points in lines.items():
            _cost_line(lower, palette, label, points)
        lower.set_ylabel(f"epsilon of {result.budget.tokens} tokens")
        lower.set_yscale("log")
        lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _logarithmic(upper, values)
    _logarithmic(lower, values)
    lower.set_xlabel(_AXES[result.quantity])
    _legend(upper, palette)
    return _png(figure)


def _line(axes: Axes, palette: Palette, label: str, points: Sequence[SweepPoint]) -> None:
    finite = [point for point in points if _finite(point.result)]
    if not finite:
        return
    colour, marker = style(palette, label)
    values = [point.value for point in finite]
    estimates = [point.result.perplexity for point in finite if point.result.perplexity]
    axes.plot(
        values,
        [estimate.mean for estimate in estimates],
        marker=marker,
        markersize=4.5,
        linewidth=1.6,
        color=colour,
        label=label,
    )


def _cost_line(axes: Axes, palette: Palette, label: str, points: Sequence[SweepPoint]) -> None:
    costs = [(point.value, point.result.reached.rdp) for point in points if point.result.reached.rdp is not None]
    colour, marker = style(palette, label)
    if costs:
        axes.plot(*zip(*costs, strict=True), marker=marker, markersize=4.5, linewidth=1.6, color=colour)


def _lines(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    lines: dict[str, list[SweepPoint]] = {}
    for point in points:
        lines.setdefault(point.result.label, []).append(point)
    return lines


def style(palette: Palette, label: str) -> tuple[str, str]:
    """Returns a label's colour and marker, a unique pair that is the same in every figure."""
    index = labels().index(label)
    return palette.lines[index % len(palette.lines)], _MARKERS[index % len(_MARKERS)]


def _canvas(palette: Palette, height: float, rows: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.6, height), layout="constrained", facecolor=palette.paper)
    axes = figure.subplots(rows, sharex=rows > 1)
    for panel in axes if rows > 1 else [axes]:
        panel.set_facecolor(palette.paper)
        panel.tick_params(colors=palette.muted, labelcolor=palette.ink, length=3)
        panel.xaxis.label.set_color(palette.ink)
        panel.yaxis.label.set_color(palette.ink)
        panel.grid(color=palette.rule, linewidth=0.7)
        panel.set_axisbelow(True)
        for side, spine in panel.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(palette.rule)
    return figure, axes


def _legend(axes: Axes, palette: Palette) -> None:
    axes.legend(
        frameon=False,
        fontsize=8.5,
        labelcolor=palette.ink,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        borderpad=0,
    )


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _changed(table: Table, label: str) -> Estimate | None:
    """Returns a method's change from the public model; None for the public model itself."""
    result = next(result for result in table.results if result.label == label)
    return None if result.protocol == "public" else result.change


def _finite(result: Result) -> bool:
    return result.perplexity is not None and math.isfinite(result.perplexity.mean)


def _errors(changes: Sequence[Estimate]) -> list[list[float]] | None:
    if any(change.low is None or change.high is None for change in changes):
        return None
    return [
        [100 * (change.mean - (change.low or 0.0)) for change in changes],
        [100 * ((change.high or 0.0) - change.mean) for change in changes],
    ]


def _percent(change: float) -> float:
    return 100 * (change - 1)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, facecolor=figure.get_facecolor())
    return file.getvalue()
