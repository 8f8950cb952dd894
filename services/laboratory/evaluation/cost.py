"""Draws what privacy costs in quality, for the front page: `python -m services.laboratory.evaluation.cost`.

Writes `cost.svg` from `commits.json`, both beside this file. The latter holds the figures that
`python -m tests.benchmarks.private_base` measured on the commits (tests/benchmarks/README.md has the command).
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from services.files import write_atomically
from services.laboratory.evaluation.figures import PALETTES, canvas, logarithmic, shared_legend

MEASURED = Path(__file__).with_name("commits.json")
FIGURE = Path(__file__).with_name("cost.svg")
GAIN = "gain over the public model in nats a token, and its 95 % interval"
_PALETTE = PALETTES["light"]

# A mean with the ends of its interval.
Interval = Sequence[float]


def draw(measured: Mapping[str, Any]) -> bytes:
    """Returns an SVG of gains over the number of tokens, a panel an epsilon. The same figures give the same bytes."""
    by_epsilon = measured[GAIN]
    figure, panels = canvas(_PALETTE, height=3.6, columns=len(by_epsilon))
    alone, based, trained = _PALETTE.lines[:3]
    for axes, (epsilon, gain) in zip(panels, by_epsilon.items(), strict=True):
        axes.set_title(f"epsilon {epsilon}", fontsize=9, color=_PALETTE.ink)
        _level(axes, gain["DP-SGD"], trained, "DP-SGD: any number of tokens")
        _line(axes, gain["individual"], alone, f"ensemble of {measured['parts']} parts")
        _line(axes, gain["individual on a base"], based, "ensemble on a private base")
        logarithmic(axes, [int(tokens) for tokens in gain["individual"]])
        axes.axhline(0, color=_PALETTE.muted, linewidth=1, label="public model")
        axes.set_xlabel("number of tokens that the budget pays for")
    panels[0].set_ylabel("gain, in nats a token")
    shared_legend(figure, panels[0], _PALETTE)
    file = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "privmix"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Description": json.dumps(measured)})
    return file.getvalue()


def _line(axes: Axes, by_tokens: Mapping[str, Interval], colour: str, label: str) -> None:
    tokens = [int(tokens) for tokens in by_tokens]
    means = [mean for mean, _, _ in by_tokens.values()]
    errors = [
        [mean - low for mean, low, _ in by_tokens.values()],
        [high - mean for mean, _, high in by_tokens.values()],
    ]
    axes.errorbar(tokens, means, yerr=errors, fmt="-o", color=colour, markersize=4.5, capsize=2, label=label)


def _level(axes: Axes, gain: Interval, colour: str, label: str) -> None:
    axes.axhspan(*gain[1:], color=colour, alpha=0.12, linewidth=0)
    axes.axhline(gain[0], color=colour, linestyle="--", linewidth=1.2, label=label)


if __name__ == "__main__":
    write_atomically(FIGURE, draw(json.loads(MEASURED.read_bytes())))
