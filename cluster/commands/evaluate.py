"""Implements `privmix evaluate`, which writes a table and a report from held-out text."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from cluster.console import console, display
from cluster.options import (
    DeltaOption,
    DrawnOption,
    EpsilonsOption,
    JsonOption,
    ProtocolsOption,
    RunsOption,
    RunTokensOption,
    SkipBadOption,
    SweepOption,
    TextFieldOption,
    TokensOption,
    UserFieldOption,
)
from services.laboratory.evaluation.ensembles import Ensembles
from services.laboratory.evaluation.estimate import Estimate
from services.laboratory.evaluation.evaluate import EvaluationOptions
from services.laboratory.evaluation.evaluate import evaluate as evaluate_methods
from services.laboratory.evaluation.methods import QUANTITIES
from services.laboratory.evaluation.report import record, write_report
from services.laboratory.evaluation.results import Evaluation, Result, Table
from services.privacy import accounting
from services.training.corpus import Corpus

_DEFAULTS = EvaluationOptions()


def evaluate(
    held_out: Annotated[Path, typer.Argument(help="Held-out text: JSON Lines file, or a dataset directory.")],
    ensemble: Annotated[
        list[Path], typer.Option(help="An ensemble's directory; repeat for other sizes. The table shows the largest.")
    ],
    output: Annotated[
        Path, typer.Option(help="The directory for the report. An interrupted evaluation continues there.")
    ],
    finetuned: Annotated[
        Path | None, typer.Option(help="An ensemble of one part, from `privmix train --parts 1`, as a reference.")
    ] = None,
    dp_sgd: Annotated[
        list[Path] | None, typer.Option(help="A model from `privmix train --dp-sgd`; repeat for other budgets.")
    ] = None,
    epsilon: EpsilonsOption = list(_DEFAULTS.epsilons),  # noqa: B006
    delta: DeltaOption = _DEFAULTS.delta,
    tokens: TokensOption = list(_DEFAULTS.tokens),  # noqa: B006
    protocol: ProtocolsOption = None,
    run_tokens: RunTokensOption = _DEFAULTS.run_tokens,
    drawn: DrawnOption = _DEFAULTS.drawn,
    runs: RunsOption = _DEFAULTS.runs,
    context: Annotated[int, typer.Option(help="The maximum number of tokens in a block of text.")] = _DEFAULTS.context,
    sweep: SweepOption = list(QUANTITIES),  # noqa: B006
    precision: Annotated[
        str, typer.Option(help="The precision of the models: auto, bfloat16 or float32.")
    ] = _DEFAULTS.precision,
    user_field: UserFieldOption = "user",
    text_field: TextFieldOption = "text",
    skip_bad: SkipBadOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the perplexity of all methods on held-out text at the same budget, with their actual guarantees.

    The result is measured on private models, so it is for the operator only. The exit status is 0 if the report is
    written, 2 if the input is invalid, 1 if a task failed, and 130 if the command was interrupted. Run it again to
    continue.
    """
    started = time.monotonic()
    evaluation = evaluate_methods(
        Corpus(held_out, user_field, text_field, skip_bad),
        output,
        Ensembles.load(ensemble, finetuned, dp_sgd or []),
        EvaluationOptions.checked(
            epsilons=epsilon,
            delta=delta,
            tokens=tokens,
            protocols=protocol or None,
            run_tokens=run_tokens,
            drawn=drawn,
            runs=runs,
            context=context,
            sweeps=sweep,
            precision=precision,
        ),
        display(as_json),
    )
    report(evaluation, output, time.monotonic() - started, as_json)


def report(evaluation: Evaluation, output: Path, seconds: float, as_json: bool) -> None:
    """Writes the files and prints the result."""
    written = write_report(evaluation, output)
    if as_json:
        print(json.dumps(record(evaluation), indent=2, allow_nan=False))
        return
    shown = console()
    for table in evaluation.tables:
        budget = table.budget
        rich_table = RichTable(
            "method",
            "parts",
            "guarantee",
            "perplexity",
            "95 %",
            "change",
            "epsilon (Rényi)",
            "(PLD)",
            title=f"epsilon {accounting.stated(budget.epsilon)} at delta {budget.delta:g} for {budget.tokens} tokens",
            title_justify="left",
        )
        for result in table.results:
            rich_table.add_row(*_cells(result))
        shown.print(rich_table)
        shown.print(_gains(table))
    print(f"{written[0]}: the report, in {seconds:.0f} s, with {', '.join(path.name for path in written[1:])}")


def _gains(table: Table) -> RichTable:
    """Returns the gains over the public model by the number of tokens before a position."""
    ranges = {(gain.first, gain.last): gain.positions for result in table.results for gain in result.gains}
    columns = (f"{first} to {last}, {positions} tokens" for (first, last), positions in ranges.items())
    shown = RichTable("nats a token, by context", *columns)
    for result in table.results:
        if result.problem is None and result.protocol != "public":
            gains = {(gain.first, gain.last): gain.gain for gain in result.gains}
            shown.add_row(
                result.name, *("-" if (own := gains.get(each)) is None else _interval(own) for each in ranges)
            )
    return shown


def _interval(value: Estimate) -> str:
    ends = "" if value.low is None or value.high is None else f" ({value.low:.3f} to {value.high:.3f})"
    return f"{value.mean:.3f}{ends}"


def _cells(result: Result) -> tuple[str, ...]:
    if result.problem is not None or result.perplexity is None:
        return result.name, str(result.parts), "-", "not at this budget", "", "", "", ""
    low, high = result.perplexity.low, result.perplexity.high
    measured = result.reached.measured
    return (
        result.name,
        str(result.parts),
        result.status,
        f"{result.perplexity.mean:.2f}",
        "" if low is None or high is None else f"{low:.2f} to {high:.2f}",
        "" if result.change is None else f"{100 * (result.change.mean - 1):+.1f} %",
        _shown(result.reached.rdp) if measured is None else f"{_shown(measured)} measured",
        _shown(result.reached.pld),
    )


def _shown(epsilon: float | None) -> str:
    return "-" if epsilon is None else accounting.shown(epsilon)
