"""Writes an evaluation as JSON, CSV, PNG figures and one self-contained HTML page."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from privmix.foundation.files import write_atomically
from privmix.laboratory.evaluation import figures
from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.results import Evaluation, Result, ResultTable, SweepResult
from privmix.laboratory.evaluation.trial import CONTEXTS
from privmix.laboratory.html_report import picture, render
from privmix.privacy import accounting
from privmix.training.options import TokenBudget

JSON_FILE, CSV_FILE, HTML_FILE = "evaluation.json", "evaluation.csv", "report.html"

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_DIGITS = 2
_DASH, _MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


def write_report(evaluation: Evaluation, output: Path) -> tuple[Path, ...]:
    """Writes all files of the report, each atomically.

    Returns:
        their paths, the HTML page first.
    """
    pictures = {"perplexity-overview": figures.overview(evaluation.tables)}
    pictures |= {f"gap-{quantity}": draw("light") for quantity, draw in figures.gaps(evaluation.tables).items()}
    pictures |= {f"perplexity-{sweep.quantity}": figures.sweep(sweep) for sweep in evaluation.sweeps}
    files = {
        HTML_FILE: page(evaluation).encode(),
        JSON_FILE: json.dumps(record(evaluation), indent=2, allow_nan=False).encode() + b"\n",
        CSV_FILE: _csv(evaluation).encode(),
        **{f"{name}.png": picture for name, picture in pictures.items()},
    }
    for name, content in files.items():
        write_atomically(output / name, content)
    return tuple(output / name for name in files)


def record(evaluation: Evaluation) -> dict[str, Any]:
    """Returns the JSON output. Infinite numbers become "infinite", because JSON cannot represent them."""
    content = {"model": evaluation.base_model, **_plain(asdict(evaluation))}
    del content["base_model"]
    return content


def page(evaluation: Evaluation) -> str:
    """Renders the HTML report with embedded figures."""
    return render(
        _TEMPLATE,
        filters={
            "number": _number,
            "percent": _percent,
            "epsilon": _epsilon,
            "stated": accounting.stated,
            "interval": _interval,
            "gain": _gain,
        },
        contexts=CONTEXTS,
        evaluation=evaluation,
        findings=list(_findings(evaluation)),
        overview=_pictures(partial(figures.overview, evaluation.tables)),
        gaps={quantity: _pictures(draw) for quantity, draw in figures.gaps(evaluation.tables).items()},
        sweeps=[
            (sweep, figures.TITLES[sweep.quantity], _pictures(partial(figures.sweep, sweep)))
            for sweep in evaluation.sweeps
        ],
        sizes=sorted({result.parts for result in evaluation.tables[0].results if result.protocol == "ensemble"}),
        several=len({result.ensemble for table in evaluation.tables for result in table.results}) > 1,
        tokens=len({table.budget.tokens for table in evaluation.tables}),
        infinite=math.inf,
    )


def _findings(evaluation: Evaluation) -> Iterator[str]:
    """Yields the sentences of the summary."""
    for table in evaluation.tables:
        public, best = table.of("public"), table.best_certified()
        if best is None or public is None:
            continue
        reference = table.reference()
        closed = table.gap_closed(best)
        yield (
            f"At epsilon {accounting.stated(table.budget.epsilon)} (delta {table.budget.delta:g}, "
            f"{table.budget.tokens:,} tokens) the best method certified for users is {best.name}"
            + (f" with {best.parts} parts" if best.parts > 1 else "")
            + f": perplexity {_number(best.perplexity)}, compared with {_number(public.perplexity)} of the public model"
            + (
                f" and {_number(reference.perplexity)} of the best model without privacy ({_named(reference)}). It "
                f"closes {_percent(closed.mean)} of the gap."
                if reference is not None and closed is not None
                else "."
            )
        )


def _named(reference: Result) -> str:
    return reference.label if reference.parts == 1 else f"{reference.label}, {reference.parts} parts"


def _pictures(draw: Callable[[figures.Theme], bytes]) -> Mapping[str, str]:
    return {theme: picture(draw(theme)) for theme in figures.PALETTES}


def _number(value: Estimate | float | None, digits: int = 1) -> str:
    mean = value.mean if isinstance(value, Estimate) else value
    if mean is None:
        return _DASH
    return "∞" if math.isinf(mean) else f"{mean:,.{digits}f}"


def _interval(value: Estimate | None, digits: int = 1) -> str:
    if value is None or value.low is None or value.high is None:
        return ""
    return f"{value.low:,.{digits}f} {_DASH} {value.high:,.{digits}f}"


def _gain(result: Result, first: int, last: int) -> str:
    for own in result.gains:
        if (own.first, own.last) == (first, last):
            return _number(own.gain, 3).replace("-", _MINUS)
    return _DASH


def _percent(fraction: float | None, digits: int = 0) -> str:
    if fraction is None:
        return _DASH
    return f"{100 * fraction:.{digits}f} %".replace("-", _MINUS)


def _epsilon(value: float | None) -> str:
    return _DASH if value is None else accounting.shown(value, _DIGITS)


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


def _csv(evaluation: Evaluation) -> str:
    """Returns CSV with a line for each method of each table and for each point of each sweep."""
    lines: list[tuple[str, float | str, ResultTable | SweepResult, Result]] = [
        *(("table", "", table, result) for table in evaluation.tables for result in table.results),
        *((sweep.quantity, point.value, sweep, point.result) for sweep in evaluation.sweeps for point in sweep.points),
    ]
    file = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for figure, value, source, result in lines:
        row = {"figure": figure, "value": value, **source.budget.model_dump(), **_flat(result)}
        if writer is None:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow(row)
    return file.getvalue()


def _flat(result: Result) -> dict[str, Any]:
    row = {
        "method": result.label,
        "protocol": result.protocol,
        "ensemble": result.ensemble,
        "parts": result.parts,
        "guarantee": result.status,
        "notion": result.notion,
        "adjacency": result.adjacency,
    }
    for name in ("perplexity", "possible_perplexity", "change", "hits"):
        estimate: Estimate | None = getattr(result, name)
        row |= {
            name: estimate and estimate.mean,
            f"{name}_low": estimate and estimate.low,
            f"{name}_high": estimate and estimate.high,
        }
    by_range = {(gain.first, gain.last): gain.gain for gain in result.gains}
    for first, last in CONTEXTS:
        estimate = by_range.get((first, last))
        name = f"gain_{first}_{last}"
        row |= {
            name: estimate and estimate.mean,
            f"{name}_low": estimate and estimate.low,
            f"{name}_high": estimate and estimate.high,
        }
    row |= {name: getattr(result, name) for name in ("base", "possible", "answered", "asked")}
    row |= {f"epsilon_{name}": value for name, value in asdict(result.reached).items()}
    return row | {"parameters": json.dumps(_plain(result.parameters), sort_keys=True), "problem": result.problem}
