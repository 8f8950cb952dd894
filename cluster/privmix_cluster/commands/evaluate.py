"""Implements `privmix evaluate`: the perplexity of all methods on held-out text, over any field of a protocol."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privmix.laboratory.evaluation.options import EvaluationOptions
from privmix_cluster.console import console, display
from privmix_cluster.option_groups import grouped
from privmix_cluster.options import CorpusOptions, DeltaOption, DrawnOption, JsonOption
from privmix_cluster.parameters import bad

if TYPE_CHECKING:
    from rich.table import Table

    from privmix.laboratory.evaluation.estimate import Estimate
    from privmix.laboratory.evaluation.results import Result, ResultTable

_DEFAULTS = EvaluationOptions()


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
    finetuned: Annotated[
        Path | None, typer.Option(help="An ensemble of one part, from `privmix train --parts 1`, as a reference.")
    ] = None,
    dp_sgd: Annotated[
        list[Path] | None, typer.Option(help="A model from `privmix train-base`; repeat for other budgets.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="The epsilon of the budget.")] = _DEFAULTS.epsilon,
    delta: DeltaOption = _DEFAULTS.delta,
    tokens: Annotated[int, typer.Option(help="The number of tokens that the budget must last for.")] = _DEFAULTS.tokens,
    protocol: Annotated[
        list[str] | None,
        typer.Option(help="A protocol to evaluate beside the references; repeat for more. Default: all."),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="A value of a protocol's field; repeat for more."),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE,VALUE...",
            help="A table for each value of a field of the budget or of a protocol, such as epsilon=2,8 or q=0.1,0.5.",
        ),
    ] = None,
    run_tokens: Annotated[
        int | None, typer.Option(help="The number of tokens in a run. Default: those of the smallest budget.")
    ] = _DEFAULTS.run_tokens,
    drawn: DrawnOption = _DEFAULTS.drawn,
    runs: Annotated[int, typer.Option(help="The number of runs. They use different text if there is enough of it.")] = (
        _DEFAULTS.runs
    ),
    context: Annotated[int, typer.Option(help="The maximum number of tokens in a block of text.")] = _DEFAULTS.context,
    precision: Annotated[
        str, typer.Option(help="The precision of the models: auto, bfloat16 or float32.")
    ] = _DEFAULTS.precision,
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
    field, values = (None, "") if sweep is None else _assigned("sweep", sweep)
    options = EvaluationOptions.checked(
        epsilon=epsilon,
        delta=delta,
        tokens=tokens,
        protocols=protocol or None,
        fields=dict(_assigned("set", each) for each in given or ()),
        sweep=field,
        values=tuple(value.strip() for value in values.split(",") if value.strip()),
        run_tokens=run_tokens,
        drawn=drawn,
        runs=runs,
        context=context,
        precision=precision,
    )
    loaded = ComparedEnsembles.load(ensemble, finetuned, dp_sgd or [])
    evaluation = evaluate_methods(reading.corpus(held_out), output, loaded, options, display())
    written = write_report(evaluation, output)
    if as_json:
        print(json.dumps(record(evaluation), indent=2, allow_nan=False))
        return
    for table in evaluation.tables:
        _show(table, evaluation.sweep)
    print(f"{written[0]}: all results, in {time.monotonic() - started:.0f} s; the plot is {written[1].name}")


def _assigned(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise bad(option, f"must be FIELD=VALUE, such as q=0.1, got {text!r}")
    return name.strip().replace("-", "_"), value.strip()


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
