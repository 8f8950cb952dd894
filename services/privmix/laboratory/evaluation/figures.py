"""Draws the figures of a report: the perplexity of every method, and its dependence on each swept quantity."""

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.methods import labels
from privmix.laboratory.evaluation.results import Result, ResultTable, SweepPoint, SweepResult
from privmix.privacy import accounting

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
_GAP = "gap closed, in %"
_AXES = {
    "epsilon": "epsilon of the budget",
    "tokens": "number of tokens that the budget pays for",
    "q": "probability q with which a part is drawn",
    "order": "Rényi order",
    "radius": "radius c around the public model, in nats",
}
TITLES = {
    "epsilon": "Perplexity by epsilon",
    "tokens": "Perplexity by the number of tokens",
    "q": "Perplexity by the fraction of drawn parts",
    "order": "Perplexity by Rényi order",
    "radius": "Perplexity and cost by radius",
}


def overview(tables: Sequence[ResultTable], theme: Theme = "light") -> bytes:
    """Draws a PNG of every method's change in perplexity from the public model's on the same tokens, with intervals."""
    palette = PALETTES[theme]
    distinct = dict.fromkeys(result.name for table in tables for result in table.results)
    labels = [name for name in distinct if any(_changed(table, name) for table in tables)]
    figure, axes = canvas(palette, height=1.2 + max(0.36, 0.13 * len(tables)) * len(labels))
    axes.axvline(0, color=palette.muted, linewidth=1)
    for index, table in enumerate(tables):
        offset = (index - (len(tables) - 1) / 2) * min(0.26, 0.8 / len(tables))
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
            label=_named(table, tables),
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("change of the perplexity from the public model's, in %, with 95 % interval")
    axes.grid(axis="y", visible=False)
    _legend(axes, palette)
    return png(figure)


Draw = Callable[[Theme], bytes]


def gaps(tables: Sequence[ResultTable]) -> dict[Literal["parts", "tokens"], Draw]:
    """Returns functions that draw the share of the gap to the best model without privacy that methods close.

    One draws it over the parts of several ensembles, the other over the tokens of several budgets.
    """
    draws: dict[Literal["parts", "tokens"], Draw] = {}
    if any(table.reference() is None for table in tables):
        return draws
    if len(set(_ensembles(tables).values())) > 1:
        draws["parts"] = partial(_gap_by_parts, tables)
    if len({table.budget.tokens for table in tables}) > 1:
        draws["tokens"] = partial(_gap_by_tokens, tables)
    return draws


def _gap_by_parts(tables: Sequence[ResultTable], theme: Theme) -> bytes:
    """Draws a panel for each number of tokens, with a line for the best row of each protocol at each epsilon."""
    palette, ensembles = PALETTES[theme], _ensembles(tables)
    epsilons = sorted({table.budget.epsilon for table in tables})
    private = (result for table in tables for result in table.results if result.protects_users)
    protocols = sorted({result.protocol for result in private if result.ensemble in ensembles})
    panels = {
        f"{tokens:,} tokens": [table for table in tables if table.budget.tokens == tokens]
        for tokens in sorted({table.budget.tokens for table in tables})
    }

    def draw(axes: Axes, shown: Sequence[ResultTable]) -> None:
        for table in shown:
            colour = palette.lines[epsilons.index(table.budget.epsilon) % len(palette.lines)]
            named = f"epsilon {accounting.stated(table.budget.epsilon)}"
            for marker, protocol in zip(_MARKERS, protocols, strict=False):
                best = [table.best_certified(protocol, name) for name in ensembles]
                _gap_line(axes, table, _by_parts(best), colour, f"-{marker}", f"{protocol}, {named}")
            _gap_of_dp_sgd(axes, table, colour, f"dp-sgd, {named}")
        whole = [shown[0].of("ensemble", name) for name in ensembles]
        _gap_line(axes, shown[0], _by_parts(whole), palette.muted, ":x", "ensemble, not private")
        logarithmic(axes, sorted(set(ensembles.values())))
        axes.set_xlabel("parts")

    return _gap_figure(palette, panels, draw)


def _gap_by_tokens(tables: Sequence[ResultTable], theme: Theme) -> bytes:
    """Draws a panel for each epsilon, with a line for the best certified row of each ensemble."""
    palette, ensembles = PALETTES[theme], _ensembles(tables)
    alone = len(set(ensembles.values())) == len(ensembles)
    panels = {
        f"epsilon {accounting.stated(epsilon)}": [table for table in tables if table.budget.epsilon == epsilon]
        for epsilon in sorted({table.budget.epsilon for table in tables})
    }

    def draw(axes: Axes, shown: Sequence[ResultTable]) -> None:
        for index, (name, parts) in enumerate(ensembles.items()):
            best = [(table.budget.tokens, table, table.best_certified(ensemble=name)) for table in shown]
            colour = palette.lines[index % len(palette.lines)]
            label = f"{parts} parts" if alone else name
            points = [(tokens, table.gap_closed(result)) for tokens, table, result in best if result is not None]
            _estimates(axes, points, colour, f"-{_MARKERS[index % len(_MARKERS)]}", label)
        _gap_of_dp_sgd(axes, shown[0], palette.muted, "dp-sgd")
        logarithmic(axes, sorted(table.budget.tokens for table in shown))
        axes.set_xlabel(_AXES["tokens"])

    return _gap_figure(palette, panels, draw)


def _gap_figure(
    palette: Palette, panels: Mapping[str, Sequence[ResultTable]], draw: Callable[[Axes, Sequence[ResultTable]], None]
) -> bytes:
    """Draws the tables of each panel, by its title, beside each other with one legend."""
    figure, row = canvas(palette, height=4.2, columns=len(panels))
    for axes, (title, shown) in zip(row, panels.items(), strict=True):
        axes.set_title(title, fontsize=9.5, color=palette.ink)
        draw(axes, shown)
    row[0].set_ylabel(_GAP)
    shared_legend(figure, row[0], palette)
    return png(figure)


def _ensembles(tables: Sequence[ResultTable]) -> dict[str, int]:
    """Returns the number of parts of each ensemble by its name, in ascending order."""
    found = {result.ensemble: result.parts for result in tables[0].results if result.protocol == "ensemble"}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _by_parts(results: Iterable[Result | None]) -> list[tuple[float, Result]]:
    """Returns the best result for each number of parts."""
    best: dict[int, tuple[float, Result]] = {}
    for result in results:
        if result is not None and result.perplexity is not None:
            candidate = result.perplexity.mean, result
            best[result.parts] = min(best.get(result.parts, candidate), candidate, key=lambda pair: pair[0])
    return [(float(parts), best[parts][1]) for parts in sorted(best)]


def _gap_line(
    axes: Axes, table: ResultTable, points: Sequence[tuple[float, Result]], colour: str, line: str, label: str
) -> None:
    _estimates(axes, [(value, table.gap_closed(result)) for value, result in points], colour, line, label)


def _estimates(axes: Axes, points: Sequence[tuple[float, Estimate | None]], colour: str, line: str, label: str) -> None:
    """Draws a line with intervals, in %."""
    known = [(value, estimate) for value, estimate in points if estimate is not None]
    if not known:
        return
    estimates = [estimate for _, estimate in known]
    axes.errorbar(
        [value for value, _ in known],
        [100 * estimate.mean for estimate in estimates],
        yerr=_errors(estimates),
        fmt=line,
        color=colour,
        markersize=4.5,
        linewidth=1.4,
        elinewidth=0.9,
        capsize=2,
        label=label,
    )


def _gap_of_dp_sgd(axes: Axes, table: ResultTable, colour: str, label: str) -> None:
    trained = table.best_certified("dp-sgd")
    closed = None if trained is None else table.gap_closed(trained)
    if closed is not None:
        axes.axhline(100 * closed.mean, color=colour, linestyle=(0, (4, 3)), linewidth=1.2, label=label)


def sweep(result: SweepResult, theme: Theme = "light") -> bytes:
    """Draws a PNG of perplexity over the quantity: a line for each method, and dashed lines for references."""
    palette = PALETTES[theme]
    with_cost = result.quantity == "radius"
    figure, axes = canvas(palette, height=6.2 if with_cost else 4.2, rows=2 if with_cost else 1)
    upper: Axes = axes[0] if with_cost else axes
    lines = _lines(result.points)
    for label, points in lines.items():
        _line(upper, palette, label, points)
    values = sorted({point.value for point in result.points})
    for reference in result.references:
        if reference.perplexity:
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
        logarithmic(upper, values)
    logarithmic(lower, values)
    lower.set_xlabel(_AXES[result.quantity])
    _legend(upper, palette)
    return png(figure)


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
    costs = [(point.value, point.result.reached.bound) for point in points if point.result.reached.bound is not None]
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
    known = labels()
    index = known.index(label) if label in known else len(known)  # a number of drawn parts that the operator chose
    return palette.lines[index % len(palette.lines)], _MARKERS[index % len(_MARKERS)]


def canvas(palette: Palette, height: float, rows: int = 1, columns: int | None = None) -> tuple[Figure, Any]:
    """Returns a figure with one panel, or with an array of `rows` or of `columns` panels."""
    figure = Figure(figsize=(7.6, height), layout="constrained", facecolor=palette.paper)
    grid = figure.subplots(rows, columns or 1, sharex=rows > 1, sharey=columns is not None, squeeze=False)
    for panel in grid.flat:
        panel.set_facecolor(palette.paper)
        panel.tick_params(colors=palette.muted, labelcolor=palette.ink, length=3)
        panel.xaxis.label.set_color(palette.ink)
        panel.yaxis.label.set_color(palette.ink)
        panel.grid(color=palette.rule, linewidth=0.7)
        panel.set_axisbelow(True)
        for side, spine in panel.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(palette.rule)
    return figure, grid[0, 0] if rows == 1 and columns is None else grid.flatten()


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


def shared_legend(figure: Figure, axes: Axes, palette: Palette) -> None:
    """Puts the legend of one panel above all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False, fontsize=8, labelcolor=palette.ink)


def logarithmic(axes: Axes, values: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _named(table: ResultTable, tables: Sequence[ResultTable]) -> str:
    """Names a table's budget by what distinguishes it."""
    epsilon = f"epsilon {accounting.stated(table.budget.epsilon)}"
    several = len({other.budget.tokens for other in tables}) > 1
    return f"{epsilon}, {table.budget.tokens:,} tokens" if several else epsilon


def _changed(table: ResultTable, name: str) -> Estimate | None:
    """Returns a method's change from the public model, of the first ensemble; None for the public model itself."""
    result = next((result for result in table.results if result.name == name), None)
    return None if result is None or result.protocol == "public" else result.change


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


def png(figure: Figure) -> bytes:
    """Returns a figure as the content of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, facecolor=figure.get_facecolor())
    return file.getvalue()
