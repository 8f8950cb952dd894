"""Writes a comparison as JSON, PNG figures and one self-contained HTML page."""

import json
from pathlib import Path
from typing import Any

from privmix.foundation.files import write_atomically
from privmix.laboratory.evaluation.figures import PALETTES, Theme, canvas, png
from privmix.laboratory.heads.compare import Cell, HeadComparison
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.names import MethodName
from privmix.laboratory.html_report import picture, render
from privmix.privacy.accounting import stated

JSON_FILE, HTML_FILE = "comparison.json", "report.html"

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_PRIVATE: tuple[MethodName, ...] = tuple(name for name, method in METHODS.items() if method.private)
_CURVE_EPSILON = 1.0
# The distance of two boxes of one epsilon. The distance of two epsilons is 1.
_BOX = 0.8 / len(_PRIVATE)


def write_report(comparison: HeadComparison, output: Path) -> Path:
    """Writes all files of the report, each atomically; returns the path of the page."""
    stages = [stage for stage in ("search", "advance") if any(cell.chosen == stage for cell in comparison.cells)]
    figures = {
        **{f"auc-{stage}": auc_over_epsilon(comparison, stage) for stage in stages},
        "roc": curves(comparison, stages[0]),
    }
    for name, figure in figures.items():
        write_atomically(output / f"{name}.png", figure)
    write_atomically(output / JSON_FILE, json.dumps(comparison.record(), indent=2).encode() + b"\n")
    page = render(
        _TEMPLATE,
        comparison=comparison,
        methods=METHODS,
        stages=stages,
        findings=list(_findings(comparison, stages[0])),
        pictures={name: picture(figure) for name, figure in figures.items()},
    )
    write_atomically(output / HTML_FILE, page.encode())
    return output / HTML_FILE


def auc_over_epsilon(comparison: HeadComparison, stage: str, theme: Theme = "light") -> bytes:
    """Draws a PNG with a box over all samples for each method and epsilon, and the non-private area as a line."""
    palette = PALETTES[theme]
    epsilons = sorted({cell.epsilon for cell in comparison.cells if cell.epsilon})
    figure, axes = canvas(palette, height=4.2)
    for index, name in enumerate(_PRIVATE):
        cells = [cell for cell in comparison.cells if cell.name == name and cell.chosen == stage]
        colour = palette.lines[index]
        boxes: list[dict[str, Any]] = [
            dict(zip(("whislo", "q1", "med", "q3", "whishi"), cell.quantiles, strict=True)) | {"fliers": []}
            for cell in cells
        ]
        places = [epsilons.index(cell.epsilon) + _BOX * (index - (len(_PRIVATE) - 1) / 2) for cell in cells]
        if boxes:
            axes.bxp(
                boxes,
                positions=places,
                widths=0.75 * _BOX,
                showfliers=False,
                manage_ticks=False,
                medianprops={"color": colour, "linewidth": 2},
                boxprops={"color": colour},
                whiskerprops={"color": colour},
                capprops={"color": colour},
            )
            axes.plot([], [], color=colour, label=f"{METHODS[name].label} ({METHODS[name].status})")
    reference = comparison.find("non-private", chosen=stage)
    if reference is not None:
        axes.axhline(reference.auc, color=palette.muted, linestyle=(0, (4, 3)), linewidth=1, label="not private")
    axes.set_xticks(range(len(epsilons)), [stated(epsilon) for epsilon in epsilons])
    axes.set_xlabel("epsilon")
    axes.set_ylabel("area under the curve, test rows")
    axes.legend(frameon=False, fontsize=8.5, labelcolor=palette.ink)
    return png(figure)


def curves(comparison: HeadComparison, stage: str, theme: Theme = "light") -> bytes:
    """Draws a PNG of ROC curves on logarithmic axes, with a band of 90 % of the samples."""
    palette = PALETTES[theme]
    figure, axes = canvas(palette, height=4.2)
    epsilons = sorted({cell.epsilon for cell in comparison.cells if cell.epsilon})
    epsilon = min(epsilons, key=lambda candidate: abs(candidate - _CURVE_EPSILON), default=0.0)
    for index, name in enumerate(("non-private", *_PRIVATE)):
        cell = comparison.find(name, epsilon if METHODS[name].private else 0.0, stage)
        if cell is None or not cell.curve:
            continue
        colour = palette.lines[index]
        label = METHODS[name].label + (f", epsilon {stated(epsilon)}" if METHODS[name].private else "")
        axes.plot(cell.curve["rates"], cell.curve["median"], color=colour, label=label, linewidth=1.5)
        axes.fill_between(cell.curve["rates"], cell.curve["low"], cell.curve["high"], color=colour, alpha=0.2)
    axes.plot([1e-3, 1], [1e-3, 1], color=palette.muted, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 1.05)
    axes.set_xlabel("false-positive rate")
    axes.set_ylabel("true-positive rate")
    axes.legend(frameon=False, fontsize=8.5, labelcolor=palette.ink)
    return png(figure)


def _findings(comparison: HeadComparison, stage: str) -> list[str]:
    """Returns sentences that say how much of the non-private area each method keeps, and from which epsilon."""
    reference = comparison.find("non-private", chosen=stage)
    if reference is None:
        return []
    sentences = []
    for name in _PRIVATE:
        cells = sorted(
            (cell for cell in comparison.cells if cell.name == name and cell.chosen == stage), key=lambda c: c.epsilon
        )
        if not cells:
            continue
        enough = _enough(cells, 0.94 * reference.auc)
        least = "at no epsilon" if enough is None else f"from epsilon {stated(enough.epsilon)} on"
        sentences.append(
            f"{METHODS[name].label} keeps 94 % of the non-private area {least}; at epsilon {stated(cells[0].epsilon)} "
            f"it keeps {100 * cells[0].auc / reference.auc:.1f} %. Guarantee: {comparison.guarantee(name)}."
        )
    sentences += [f"{METHODS[name].label} is left out: {reason}." for name, reason in comparison.left_out.items()]
    return sentences


def _enough(cells: list[Cell], area: float) -> Cell | None:
    """Returns the cell of the smallest epsilon from which every area is at least `area`; None if there is none."""
    enough = None
    for cell in reversed(cells):
        if cell.auc < area:
            break
        enough = cell
    return enough
