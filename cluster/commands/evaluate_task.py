"""Implements `privmix evaluate task`, which trains classifiers on sets of texts and tests them on real text."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.options import JsonOption, TextFieldOption

if TYPE_CHECKING:
    from services.laboratory.utility.task import TaskReport


def task(
    real: Annotated[Path, typer.Option(help="The private text: JSON Lines with a text and a label.")],
    held_out: Annotated[Path, typer.Option(help="Real text of other people, to test on: JSON Lines.")],
    output: Annotated[Path, typer.Option(help="The directory for the report.")],
    train: Annotated[
        list[str],
        typer.Option(help="NAME=PATH: a training set, JSON Lines or a job of `privmix generate`; repeat for more."),
    ] = [],  # noqa: B006
    label_field: Annotated[str, typer.Option(help="The field with the label, in all files.")] = "label",
    text_field: TextFieldOption = "text",
    canaries: Annotated[
        Path | None, typer.Option(help="JSON Lines with secrets, such as canaries.jsonl of `privmix demo-corpus`.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Repetitions, with other training texts and held-out people.")] = 20,
    most: Annotated[int, typer.Option(min=1, help="The largest number of training texts of a repetition.")] = 1000,
    public_model: Annotated[
        str | None, typer.Option(help="The model of the embeddings: a directory or hub id. Default: smollm2-135m.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what texts are worth for a task: train classifiers of a label on them, and test on real text.

    The result is measured on private text, so it is for the operator only. The exit status is 0 if the report is
    written, and 2 if the input is invalid.
    """
    from cluster.console import display
    from services.laboratory.utility import copies, labelled
    from services.laboratory.utility.report import write_report
    from services.laboratory.utility.task import HELD_OUT, REAL, TaskOptions, measure
    from services.training.public_model import resolve

    started = time.monotonic()
    named = labelled.parse_named(train)
    sources = {REAL: real, HELD_OUT: held_out, **named}
    if len(sources) < len(named) + 2:
        raise typer.BadParameter(f"{REAL!r} and {HELD_OUT!r} name the real text", param_hint="--train")
    private, tested, *sets = (labelled.read(name, path, text_field, label_field) for name, path in sources.items())
    secrets = () if canaries is None else copies.read_canaries(canaries)
    with display(as_json) as shown:
        report = measure(
            private,
            tested,
            sets,
            label_field=label_field,
            model=resolve(public_model),
            options=TaskOptions(seeds, most),
            canaries=secrets,
            display=shown,
        )
    page = write_report(report, output)
    print(json.dumps(report.record())) if as_json else _show(report, page, time.monotonic() - started)


def _show(report: "TaskReport", page: Path, seconds: float) -> None:
    from rich.table import Table

    from cluster.console import console
    from services.laboratory.utility.classifiers import CLASSIFIERS
    from services.laboratory.utility.report import guarantee, shown

    table = Table("trained on", "guarantee", "texts", title=f"{report.label_field}, in %", title_justify="left")
    for name in CLASSIFIERS:
        table.add_column(f"accuracy, {name}")
        table.add_column("macro-F1")
    table.add_column("MAUVE")
    table.add_column("longest copy")
    for row in report.rows:
        scores = [shown(score) for each in row.scores.values() for score in (each.accuracy, each.macro_f1)]
        closeness = "-" if row.mauve is None else f"{row.mauve:.3f}"
        table.add_row(row.name, guarantee(row), f"{row.texts:,}", *scores, closeness, str(row.copies.longest))
    console().print(table)
    for row in report.rows:
        if row.missing:
            print(f"{row.name}: has no text of {', '.join(row.missing)}")
    print(f"{page}: the report, in {seconds:.0f} s, for the operator only: it is not private")
