"""Implements `privmix evaluate`: the perplexity of all methods on held-out text, over any field of a protocol."""

import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from privmix.laboratory.evaluation.options import EvaluationOptions
from privmix_cluster.console import display
from privmix_cluster.method_options import BUDGET, MethodOptions
from privmix_cluster.option_groups import FieldsOf, Given, grouped
from privmix_cluster.options import CorpusOptions, JsonOption
from privmix_cluster.tables import show_table

if TYPE_CHECKING:
    from privmix.laboratory.evaluation.results import Result, ResultTable

_MEASURED = {"Measurement": ("run_tokens", "runs", "context", "precision")}


@grouped
def evaluate(
    held_out: Annotated[Path, typer.Argument(help="The file with held-out text: JSON Lines, CSV or Parquet.")],
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
    from privmix.budget.sentence import IMPORTED
    from privmix.laboratory.evaluation.ensembles import ComparedEnsembles
    from privmix.laboratory.evaluation.evaluate import evaluate as evaluate_methods
    from privmix.laboratory.evaluation.report import record, write_report

    started = time.monotonic()
    options = EvaluationOptions.checked(**methods.values, **measured)
    loaded = ComparedEnsembles.load(ensemble, finetuned, dp_sgd or [])
    evaluation = evaluate_methods(reading.corpus(held_out), output, loaded, options, display())
    written = write_report(evaluation, output)
    if as_json:
        print(record(evaluation).decode(), end="")
        return
    for table in evaluation.tables:
        _show(table, evaluation.sweep)
    if any(each.manifest.imported for each in loaded.all):
        print(f"The guarantees of imported parts hold only if {IMPORTED}.")
    print(f"{' and '.join(map(str, written))}: all results, in {time.monotonic() - started:.0f} s")


def _show(table: "ResultTable", sweep: str | None) -> None:
    from privmix.privacy import accounting

    budget = table.budget
    title = f"epsilon {accounting.stated(budget.epsilon)} at delta {budget.delta:g} for {budget.tokens} tokens"
    if sweep is not None and sweep not in type(budget).model_fields:
        title += f", {sweep} {table.value}"
    show_table(title, [_row(result) for result in table.results])
    show_table("nats a token, by context", [_gains(result) for result in table.results if result.gains])


def _row(result: "Result") -> dict[str, object]:
    from privmix.privacy import accounting

    named = {"method": result.name, "parts": result.parts}
    if result.problem is not None or result.perplexity is None:
        return {**named, "perplexity": "not at this budget"}
    low, high = result.perplexity.low, result.perplexity.high
    measured, bound = result.reached.measured, "at least " if result.bounded else ""
    rdp, pld = (None if each is None else accounting.shown(each) for each in (result.reached.rdp, result.reached.pld))
    return {
        **named,
        "guarantee": result.status,
        "perplexity": f"{bound}{result.perplexity.mean:.2f}",
        "mean of runs": f"{bound}{fmean(result.perplexity.runs):.2f}",
        "95 %": None if low is None or high is None else f"{low:.2f} to {high:.2f}",
        "epsilon (Rényi)": rdp if measured is None else f"{accounting.shown(measured)} measured",
        "(PLD)": pld,
        "screened": None
        if result.losses is None or (part := result.losses.screened) is None
        else f"{100 * part:.0f} %",
        "loss by quarters": None
        if result.losses is None
        else ", ".join(f"{each:.3g}" for each in result.losses.quarters),
    }


def _gains(result: "Result") -> dict[str, object]:
    """Returns the gains over the public model by the number of tokens before a position."""
    row: dict[str, object] = {"method": f"{result.name}, at most" if result.bounded else result.name}
    for each in result.gains:
        own = each.gain
        ends = "" if own is None or own.low is None or own.high is None else f" ({own.low:.3f} to {own.high:.3f})"
        place = f"{each.first} to {each.last}, {each.positions} tokens"
        row[place] = None if own is None else f"{own.mean:.3f}{ends}"
    return row
