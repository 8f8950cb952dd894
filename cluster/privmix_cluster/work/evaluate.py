"""Does the work of `privmix evaluate`."""

import json
from pathlib import Path

from rich.table import Table as RichTable

from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.report import record, write_report
from privmix.laboratory.evaluation.results import Evaluation, Result, ResultTable
from privmix.privacy import accounting
from privmix_cluster.console import console


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


def _gains(table: ResultTable) -> RichTable:
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
