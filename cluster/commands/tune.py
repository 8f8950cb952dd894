"""Implements `privmix tune`, which recommends a protocol and its settings from text that is not private."""

import math
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic_core import to_json
from rich.table import Table

from cluster.console import console, display
from cluster.options import JsonOption
from services.errors import InputError
from services.evaluation.methods import Budget
from services.evaluation.tuning import PARTS, TOLERANCE, Choice, Tuning, refuse_private
from services.evaluation.tuning import tune as search
from services.training.corpus import Corpus
from services.training.directory import SALT
from services.training.manifest import Manifest
from services.training.marks import Marks
from services.training.options import TrainingOptions
from services.training.partition import read_salt

WARNING = (
    "What is chosen here follows from the sample's text, and no ledger charges for it: tuning on the private text "
    "would cost privacy that nobody counts. The sample must be public, or set aside for this and never trained on."
)
_TRAINING = TrainingOptions(block=128, batch=1, epochs=1, learning_rate=1e-3)


def tune(
    set_aside: Annotated[
        Path, typer.Option(help="Text that is public, or set aside for tuning; never the private corpus.")
    ],
    output: Annotated[Path, typer.Option(help="The output directory. An interrupted tuning continues there.")],
    epsilon: Annotated[float, typer.Option(help="The budget.")] = 8.0,
    delta: Annotated[float, typer.Option(help="The delta of the budget.")] = 1e-5,
    tokens: Annotated[
        int, typer.Option(help="The number of tokens that the budget must last for, and of a run.")
    ] = 1024,
    parts: Annotated[list[int], typer.Option(help="A number of parts to train; repeat for more.")] = list(PARTS),  # noqa: B006
    ensemble: Annotated[
        list[Path], typer.Option(help="An ensemble of other set-aside text, instead of training one; repeat for more.")
    ] = [],  # noqa: B006
    private: Annotated[
        Path | None, typer.Option(help="The private corpus, to verify that the sample contains nothing of it.")
    ] = None,
    private_ensemble: Annotated[
        Path | None, typer.Option(help="The deployment's ensemble, to verify the same by its marks.")
    ] = None,
    salt_file: Annotated[
        Path | None, typer.Option(help="The salt of that ensemble, if it is not in its directory.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs, each on other text where it suffices.")] = 3,
    model: Annotated[str | None, typer.Option(help="Public model to train on.")] = None,
    any_guarantee: Annotated[
        bool, typer.Option("--any-guarantee", help="Show published and data-dependent guarantees too.")
    ] = False,
    user_field: Annotated[str, typer.Option(help="Field with the user's id.")] = "user",
    text_field: Annotated[str, typer.Option(help="Field with the text.")] = "text",
    as_json: JsonOption = False,
) -> None:
    """Search parts, q, radius and protocol for the best perplexity at a budget, and what each costs to compute.

    Exits with 0 when there is an answer, 2 when something given cannot be used or the sample is private, 1 when a task
    failed, and 130 when it was interrupted; run it again to continue.
    """
    typer.echo(WARNING, err=True)
    sample = Corpus(set_aside, user_field, text_field)
    _check(sample, private, private_ensemble, salt_file, ensemble)
    found = search(
        sample,
        output,
        Budget(epsilon=epsilon, delta=delta, tokens=tokens),
        parts=parts,
        ensembles=ensemble,
        runs=runs,
        model=model,
        training=_TRAINING,
        any_guarantee=any_guarantee,
        display=partial(display, as_json),
    )
    text = to_json(found, indent=2, inf_nan_mode="null").decode()
    (output / "tuning.json").write_text(text)
    _draw(found, output / "tuning.png")
    print(text) if as_json else _show(found, output)


def _check(
    sample: Corpus, private: Path | None, deployed: Path | None, salt_file: Path | None, ensembles: Sequence[Path]
) -> None:
    """Refuses a sample that shares users or texts with the private corpus, as far as this can be checked.

    Raises:
        InputError: the sample contains private text, or the corpus or its marks cannot be read.
    """
    documents = list(sample)
    if private is not None:
        marks = Marks(secrets.token_bytes(32))
        for _ in marks.of(Corpus(private, sample.user_field, sample.text_field)):
            pass
        refuse_private(documents, marks, str(private))
    if deployed is not None:
        id_ = Manifest.load(deployed).ensemble
        for directory in ensembles:
            if Manifest.load(directory).ensemble == id_:
                raise InputError(f"ensemble: {directory} is the deployed one, of private text; train one on other text")
        refuse_private(documents, _marks(deployed, salt_file), f"the text that {deployed} was trained on")
    for directory in ensembles:
        if (directory / SALT).exists():
            refuse_private(documents, _marks(directory, None), f"the text that {directory} was trained on")


def _marks(directory: Path, salt_file: Path | None) -> Marks:
    path = salt_file or directory / SALT
    if not path.exists():
        raise InputError(f"salt {path}: is not there; name the partition's salt (--salt-file)")
    try:
        return Marks.load(directory, read_salt(path))
    except OSError as error:
        raise InputError(f"{directory}: has no marks of its corpus; train again, nothing is trained twice") from error


def _show(found: Tuning, output: Path) -> None:
    shown, budget = console(), found.budget
    table = Table(
        "",
        "method",
        "guarantee",
        title=f"epsilon {budget.epsilon:g} at delta {budget.delta:g} for {budget.tokens} tokens; * is the front",
        title_justify="left",
    )
    for name in ("parts", "q", "rows a token", "perplexity", "95 %", "to public"):
        table.add_column(name, justify="right")
    for choice in found.choices:
        if choice.on_front or choice.status == "certified":
            style = "bold" if choice == found.recommended else None
            table.add_row("*" if choice.on_front else "", *_cells(choice), style=style)
    shown.print(table)
    best = found.recommended
    settings = {"protocol": best.protocol, **best.parameters}
    shown.print(
        f"Recommended, the cheapest within {TOLERANCE:.0%} of the best certified perplexity: "
        f"{best.label} with {best.parts} parts."
        if best.protocol != "public"
        else "Recommended: the public model alone; at this budget nothing certified is better by more than "
        f"{TOLERANCE:.0%}."
    )
    print(yaml.safe_dump({"privacy": settings | budget.model_dump()}, sort_keys=False), end="")
    shown.print(f"{output}: tuning.json and tuning.png have all choices", style="dim")


def _cells(choice: Choice) -> tuple[str, ...]:
    perplexity, q = choice.perplexity, choice.parameters.get("q")
    interval = "" if perplexity.low is None else f"{perplexity.low:.2f} to {perplexity.high:.2f}"
    return (
        choice.label,
        choice.status,
        "" if choice.protocol == "public" else str(choice.parts),
        "" if q is None else f"{q:.3g}",
        f"{choice.rows:.2f}",
        f"{perplexity.mean:.2f}",
        interval,
        f"{100 * (choice.change.mean - 1):+.1f} %" if math.isfinite(choice.change.mean) else "-",
    )


def _draw(found: Tuning, path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    for label in dict.fromkeys(choice.label for choice in found.choices):
        own = [choice for choice in found.choices if choice.label == label]
        axes.plot([one.rows for one in own], [one.perplexity.mean for one in own], "o", label=label, alpha=0.7)
    ahead = sorted(
        (one.rows, one.perplexity.mean) for one in found.choices if one.on_front and one.status == "certified"
    )
    axes.step(*zip(*ahead, strict=True), where="post", color="gray", label="front, certified")
    best = found.recommended
    axes.plot(best.rows, best.perplexity.mean, "o", markersize=14, fillstyle="none", color="black", label="recommended")
    budget = found.budget
    axes.set(xlabel="rows of a model for a token", ylabel="perplexity of the set-aside text")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"epsilon {budget.epsilon:g}, delta {budget.delta:g}, {budget.tokens} tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
