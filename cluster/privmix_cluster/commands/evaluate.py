"""Implements `privmix evaluate`: the perplexity of all methods on held-out text, over any field of a protocol."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privmix.laboratory.evaluation.options import EvaluationOptions
from privmix_cluster.console import console, display
from privmix_cluster.methods import BUDGET, MethodOptions
from privmix_cluster.option_groups import FieldsOf, Given, grouped
from privmix_cluster.options import CorpusOptions, JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from privmix.laboratory.evaluation.estimate import Estimate
    from privmix.laboratory.evaluation.results import Result, ResultTable

_MEASURED = {"Measurement": ("run_tokens", "runs", "context", "precision")}


@grouped
def evaluate(
    held_out: Annotated[Path, typer.Argument(help="Held-out text: JSON Lines file, or a dataset directory.")],
    ensemble: Annotated[
        list[Path], typer.Option(help="An ensemble's directory; repeat for more. The first rows are the largest's.")
    ],
    reading: CorpusOptions,
    output: Annotated[
        Path, typer.Option(help="The directory for the results. An interrupted evaluation continues there.")
    ],
    methods: MethodOptions,
    measured: Annotated[Given, FieldsOf(EvaluationOptions(), {**BUDGET, **_MEASURED})],
    finetuned: Annotated[
        Path | None, typer.Option(help="An ensemble of one part, from `privmix train --parts 1`, as a reference.")
    ] = None,
    dp_sgd: Annotated[
        list[Path] | None, typer.Option(help="A model from `privmix train-base`; repeat for other budgets.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the perplexity of all methods on held-out text at the same budget, with their actual guarantees.

    The result is measured on private models, so it is for the operator only. The exit status is 0 if the results are
    written, 2 if the input is invalid, 1 if a task failed, and 130 if the command was interrupted. Run it again to
    continue.
    """
    from privmix.laboratory.evaluation.ensembles import ComparedEnsembles
    from privmix.laboratory.evaluation.evaluate import evaluate as evaluate_methods
    from privmix.laboratory.evaluation.report import record, write_report

    started = time.monotonic()
    options = EvaluationOptions.checked(**methods.values, **measured)
    loaded = ComparedEnsembles.load(ensemble, finetuned, dp_sgd or [])
    evaluation = evaluate_methods(reading.corpus(held_out), output, loaded, options, display())
    written = write_report(evaluation, output)
    if as_json:
        print(json.dumps(record(evaluation), indent=2, allow_nan=False))
        return
    for table in evaluation.tables:
        _show(table, evaluation.sweep)
    print(f"{written[0]}: all results, in {time.monotonic() - started:.0f} s; the plot is {written[1].name}")


def _show(table: "ResultTable", sweep: str | None) -> None:
    from rich.table import Table

    from privmix.privacy import accounting

    shown, budget, best = console(), table.budget, table.best_certified()
    title = f"epsilon {accounting.stated(budget.epsilon)} at delta {budget.delta:g} for {budget.tokens} tokens"
    if sweep is not None and sweep not in type(budget).model_fields:
        title += f", {sweep} {table.value}"
    columns = ("method", "parts", "guarantee", "perplexity", "95 %", "change", "epsilon (Rényi)", "(PLD)")
    rows = Table(*columns, title=title, title_justify="left")
    for result in table.results:
        rows.add_row(*_cells(result))
    shown.print(rows)
    shown.print(_gains(table))
    if best is not None:
        print(f"Best of the methods that are certified for users: {best.name}, {best.parts} parts")


def _gains(table: "ResultTable") -> "Table":
    """Returns the gains over the public model by the number of tokens before a position."""
    from rich.table import Table

    ranges = {(gain.first, gain.last): gain.positions for result in table.results for gain in result.gains}
    columns = (f"{first} to {last}, {positions} tokens" for (first, last), positions in ranges.items())
    shown = Table("nats a token, by context", *columns)
    for result in table.results:
        if result.problem is None and result.protocol != "public":
            gains = {(gain.first, gain.last): gain.gain for gain in result.gains}
            name = f"{result.name}, at most" if result.bounded else result.name
            shown.add_row(name, *(_interval(gains.get(each)) for each in ranges))
    return shown


def _interval(value: "Estimate | None") -> str:
    if value is None:
        return "-"
    ends = "" if value.low is None or value.high is None else f" ({value.low:.3f} to {value.high:.3f})"
    return f"{value.mean:.3f}{ends}"


def _cells(result: "Result") -> tuple[str, ...]:
    if result.problem is not None or result.perplexity is None:
        return result.name, str(result.parts), "-", "not at this budget", "", "", "", ""
    low, high = result.perplexity.low, result.perplexity.high
    measured, bound = result.reached.measured, "at least " if result.bounded else ""
    return (
        result.name,
        str(result.parts),
        result.status,
        f"{bound}{result.perplexity.mean:.2f}",
        "" if low is None or high is None else f"{low:.2f} to {high:.2f}",
        "" if result.change is None else f"{bound}{100 * (result.change.mean - 1):+.1f} %",
        _epsilon(result.reached.rdp) if measured is None else f"{_epsilon(measured)} measured",
        _epsilon(result.reached.pld),
    )


def _epsilon(epsilon: float | None) -> str:
    from privmix.privacy import accounting

    return "-" if epsilon is None else accounting.shown(epsilon)
