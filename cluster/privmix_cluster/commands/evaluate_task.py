"""Implements `privmix evaluate task`, which tests classifiers on real text, and `evaluate reference`."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privmix.foundation.units import DELTA, EPSILON
from privmix_cluster.options import DeltaOption, JsonOption, TextFieldOption

if TYPE_CHECKING:
    from privmix.laboratory.utility.task import TaskReport


def task(
    real: Annotated[Path, typer.Option(help="The private text: JSON Lines with a text and a label.")],
    held_out: Annotated[Path, typer.Option(help="Real text of other people, to test on: JSON Lines.")],
    output: Annotated[Path, typer.Option(help="The directory for the report.")],
    train: Annotated[
        list[str],
        typer.Option(
            help="NAME=PATH: a training set, JSON Lines or a job of `privmix generate`; repeat for more, which are "
            "also compared with the first."
        ),
    ] = [],  # noqa: B006
    label_field: Annotated[str, typer.Option(help="The field with the label, in all files.")] = "label",
    text_field: TextFieldOption = "text",
    canaries: Annotated[
        Path | None, typer.Option(help="JSON Lines with secrets, such as canaries.jsonl of `privmix demo-corpus`.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Repetitions, with other training texts and held-out people.")] = 20,
    most: Annotated[
        int, typer.Option(min=1, help="The largest number of texts of a set to embed and to train on.")
    ] = 1000,
    public_model: Annotated[
        str | None, typer.Option(help="The model of the embeddings: a directory or hub id. Default: smollm2-135m.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what texts are worth for a task: train classifiers of a label on them, and test on real text.

    The result is measured on private text, so it is for the operator only. The exit status is 0 if the report is
    written, and 2 if the input is invalid.
    """
    from privmix.laboratory.utility import copies, labelled
    from privmix.laboratory.utility.report import write_report
    from privmix.laboratory.utility.task import HELD_OUT, REAL, TaskOptions, measure
    from privmix.training.public_model import resolve
    from privmix_cluster.console import display

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

    from privmix.laboratory.utility.classifiers import CLASSIFIERS
    from privmix.laboratory.utility.report import guarantee, shown
    from privmix_cluster.console import console

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
        if row.over_first:
            ahead = "; ".join(f"{name} {shown(score, '+')}" for name, score in row.over_first.items())
            print(f"{row.name} less {report.rows[1].name}, in points of accuracy: {ahead}")
        if row.missing:
            print(f"{row.name}: has no text of {', '.join(row.missing)}")
    print(f"{page}: the report, in {seconds:.0f} s, for the operator only: it is not private")


def reference(
    real: Annotated[Path, typer.Option(help="The private text: JSON Lines with a user, a text and a label.")],
    method: Annotated[str, typer.Option(help="invisible-ink (Vinod et al. 2025) or amin (Amin et al. 2024).")],
    output: Annotated[Path, typer.Option(help="The directory for the texts, a training set for `evaluate task`.")],
    epsilon: Annotated[
        float, typer.Option(help="The epsilon for one user's texts, replaced by others of their labels.")
    ] = EPSILON,
    delta: DeltaOption = DELTA,
    references: Annotated[int, typer.Option(min=2, help="The most users of a batch, with one text each.")] = 16,
    tokens: Annotated[
        int, typer.Option(min=1, help="The tokens of a text; for amin, the private ones of a batch.")
    ] = 64,
    seed: Annotated[int, typer.Option(help="The seed of the batches and of all draws.")] = 0,
    sigma: Annotated[
        float, typer.Option(min=0.001, help="The noise of amin's sparse vector technique; its private tokens cost it.")
    ] = 0.2,
    label_field: Annotated[str, typer.Option(help="The field with the label.")] = "label",
    text_field: TextFieldOption = "text",
    public_model: Annotated[
        str | None, typer.Option(help="The public model: a directory or hub id. Default: smollm2-135m.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write texts by a published mechanism from references in prompts, to compare with in `evaluate task`.

    The draws are seeded, so the texts are for comparison and must not be published.
    """
    from privmix.laboratory.utility.labelled import read
    from privmix.laboratory.utility.reference_texts import METHODS, ReferenceOptions, guarantee, write_texts
    from privmix.training.private_base import resolve_public
    from privmix_cluster.console import display

    if method not in METHODS:
        raise typer.BadParameter(f"must be {' or '.join(METHODS)}, not {method!r}", param_hint="--method")
    options = ReferenceOptions(method, epsilon, delta, references, tokens, seed, sigma)
    private = read("real", real, text_field, label_field)
    with display(as_json) as shown:
        count = write_texts(
            private,
            label_field,
            output,
            resolve_public(public_model),
            options,
            lambda done: shown.show({f"texts of {method}": done}),
        )
    if as_json:
        print(json.dumps({"output": str(output), "texts": count}))
    else:
        print(f"{output}: {count} texts, of batches of at most {references} users")
        print(guarantee(options))
