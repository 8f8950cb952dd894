"""Draws what privacy costs in quality, for the front page: `python -m tests.benchmarks.cost`.

Writes `cost.svg`, beside this file, from the record of `private_base`.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes

from privmix.foundation.files import write_atomically
from privmix.laboratory.evaluation.figures import PALETTES, canvas, logarithmic, shared_legend
from tests.benchmarks.figures import TOKENS, base_gain, base_rows

FIGURE = Path(__file__).with_name("cost.svg")
CORPUS = "mts_dialog_train"
_PALETTE = PALETTES["light"]

# By the number of tokens, a mean with the ends of its interval.
Gains = Mapping[int, tuple[float, float, float]]


def shown_gains() -> dict[str, dict[str, Gains]]:
    """Returns what the figure shows, by epsilon and method."""
    methods = {
        "DP-SGD": ("DP-SGD", False),
        "ensemble": ("individual", False),
        "ensemble on a private base": ("individual", True),
    }
    return {
        epsilon: {
            name: {tokens: base_gain(CORPUS, epsilon, method, tokens, based) for tokens in TOKENS}
            for name, (method, based) in methods.items()
        }
        for epsilon in sorted(base_rows(CORPUS), key=float)
    }


def draw() -> bytes:
    """Returns an SVG of gains over the number of tokens, a panel an epsilon. The same figures give the same bytes."""
    by_epsilon = shown_gains()
    figure, panels = canvas(_PALETTE, height=3.6, columns=len(by_epsilon))
    alone, based, trained = _PALETTE.lines[:3]
    for axes, (epsilon, gains) in zip(panels, by_epsilon.items(), strict=True):
        axes.set_title(f"epsilon {epsilon}", fontsize=9, color=_PALETTE.ink)
        _level(axes, gains["DP-SGD"], trained, "DP-SGD: any number of tokens")
        _line(axes, gains["ensemble"], alone, f"ensemble of {_parts()} parts")
        _line(axes, gains["ensemble on a private base"], based, "ensemble on a private base")
        logarithmic(axes, list(TOKENS))
        axes.axhline(0, color=_PALETTE.muted, linewidth=1, label="public model")
        axes.set_xlabel("number of tokens that the budget pays for")
    panels[0].set_ylabel("gain, in nats a token")
    shared_legend(figure, panels[0], _PALETTE)
    file = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "privmix"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Description": json.dumps(by_epsilon)})
    return file.getvalue()


def _parts() -> int:
    """Returns the number of parts of the figure's ensembles."""
    rows = [row for of in base_rows(CORPUS).values() for row in of]
    (parts,) = {row["parts"] for row in rows if row["parts"] is not None}
    return int(parts)


def _line(axes: Axes, gains: Gains, colour: str, label: str) -> None:
    means = [mean for mean, _, _ in gains.values()]
    errors = [[mean - low for mean, low, _ in gains.values()], [high - mean for mean, _, high in gains.values()]]
    axes.errorbar(list(gains), means, yerr=errors, fmt="-o", color=colour, markersize=4.5, capsize=2, label=label)


def _level(axes: Axes, gains: Gains, colour: str, label: str) -> None:
    mean, low, high = gains[TOKENS[0]]
    axes.axhspan(low, high, color=colour, alpha=0.12, linewidth=0)
    axes.axhline(mean, color=colour, linestyle="--", linewidth=1.2, label=label)


if __name__ == "__main__":
    write_atomically(FIGURE, draw())
