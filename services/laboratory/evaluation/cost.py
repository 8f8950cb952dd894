"""Draws what privacy costs in quality, for the front page: `python -m services.laboratory.evaluation.cost`.

Writes `cost.svg` from `speeches.json`, both beside this file. The latter holds the figures that `privmix compare`
measured on the speeches (tests/benchmarks/README.md has its command).
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

MEASURED = Path(__file__).with_name("speeches.json")
FIGURE = Path(__file__).with_name("cost.svg")
CHANGE = "change of the perplexity in %, and its 95 % interval"
_PALETTE = PALETTES["light"]

# A mean in % with the ends of its interval.
Interval = Sequence[float]


def draw(measured: Mapping[str, Any]) -> bytes:
    """Returns an SVG of the change in perplexity over the number of tokens. The same figures give the same bytes."""
    change = measured[CHANGE]
    figure, axes = canvas(_PALETTE, height=3.6)
    axes.axhline(0, color=_PALETTE.muted, linewidth=1, label="public model")
    for epsilon, colour in zip(sorted(change["exponential"], key=float), _PALETTE.lines, strict=False):
        by_tokens = {int(tokens): found for tokens, found in change["exponential"][epsilon].items()}
        _line(axes, by_tokens, colour, f"epsilon {epsilon}, {measured['parts']} parts, exponential")
        _level(axes, change["dp-sgd"][epsilon], colour, "--", f"epsilon {epsilon}, DP-SGD, any number of tokens")
    logarithmic(axes, sorted(by_tokens))
    _level(axes, change["ensemble"], _PALETTE.muted, ":", f"not private, {measured['parts']} parts")
    _level(axes, change["finetuned"], _PALETTE.ink, "-.", "not private, one model")
    axes.set_xlabel("number of tokens that the budget pays for")
    axes.set_ylabel("change of the perplexity, in %")
    shared_legend(figure, axes, _PALETTE)
    file = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "privmix"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Description": json.dumps(measured)})
    return file.getvalue()


def _line(axes: Axes, by_tokens: Mapping[int, Interval], colour: str, label: str) -> None:
    means = [mean for mean, _, _ in by_tokens.values()]
    errors = [
        [mean - low for mean, low, _ in by_tokens.values()],
        [high - mean for mean, _, high in by_tokens.values()],
    ]
    axes.errorbar(list(by_tokens), means, yerr=errors, fmt="-o", color=colour, markersize=4.5, capsize=2, label=label)


def _level(axes: Axes, change: Interval, colour: str, line: str, label: str) -> None:
    axes.axhline(change[0], color=colour, linestyle=line, linewidth=1.2, label=label)


if __name__ == "__main__":
    write_atomically(FIGURE, draw(json.loads(MEASURED.read_bytes())))
