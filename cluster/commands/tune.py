"""Implements `privmix tune`, which recommends a protocol and its settings from public or set-aside text.

With `--private` it also chooses among the best ones on private held-out users, at a price that a ledger counts.
"""

import json
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
from cluster.options import DrawnOption, JsonOption, TextFieldOption, UserFieldOption
from services.errors import InputError
from services.laboratory.evaluation.private_choice import PrivateChoice, choose
from services.laboratory.evaluation.tuning import PARTS, RUN_TOKENS, TOLERANCE, Choice, Tuning, refuse_private
from services.laboratory.evaluation.tuning import tune as search
from services.privacy.accounting import stated
from services.training.corpus import Corpus
from services.training.directory import SALT
from services.training.expectation import TokenBudget
from services.training.manifest import Manifest
from services.training.marks import Marks
from services.training.options import TrainingOptions
from services.training.partition import read_salt

WARNING = (
    "The recommendation depends on the sample's text, and no ledger charges for it: tuning on the private text would "
    "cost privacy that is not counted. The sample must be public, or set aside for tuning and never trained on."
)
_TRAINING = TrainingOptions(block=128, batch=1, epochs=1)


def tune(
    set_aside: Annotated[
        Path, typer.Option(help="A corpus that is public or set aside for tuning, never the private corpus.")
    ],
    output: Annotated[Path, typer.Option(help="The output directory. An interrupted tuning continues there.")],
    epsilon: Annotated[float, typer.Option(help="The epsilon of the budget.")] = 8.0,
    delta: Annotated[float, typer.Option(help="The delta of the budget.")] = 1e-5,
    tokens: Annotated[int, typer.Option(help="The number of tokens that the budget must last for.")] = 1024,
    parts: Annotated[list[int], typer.Option(help="A number of parts to train; repeat for more.")] = list(PARTS),  # noqa: B006
    ensemble: Annotated[
        list[Path],
        typer.Option(help="An ensemble of other set-aside text to use instead of training; repeat for more."),
    ] = [],  # noqa: B006
    private: Annotated[
        Path | None,
        typer.Option(
            help="A corpus of private held-out users. Their text decides among the best settings of the sample."
        ),
    ] = None,
    private_epsilon: Annotated[
        float | None, typer.Option(help="The epsilon that the choice on --private costs, with delta 0.")
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(help="The ledger of that choice: a SQLite file or a database URL.")
    ] = None,
    ledger_epsilon: Annotated[
        float | None, typer.Option(help="The epsilon of a new ledger, for all choices on the same users.")
    ] = None,
    private_corpus: Annotated[
        Path | None, typer.Option(help="The private corpus, to verify that the sample contains nothing of it.")
    ] = None,
    private_ensemble: Annotated[
        Path | None,
        typer.Option(help="The deployment's ensemble, to verify with its marks that the sample shares no text."),
    ] = None,
    salt_file: Annotated[
        Path | None, typer.Option(help="The salt of --private-ensemble, if it is not in its directory.")
    ] = None,
    runs: Annotated[
        int, typer.Option(min=1, help="The number of runs. They use different text if there is enough of it.")
    ] = 3,
    run_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"The number of tokens in a run. Default: --tokens, at most {RUN_TOKENS}.")
    ] = None,
    drawn: DrawnOption = None,
    model: Annotated[str | None, typer.Option(help="The public model, as for `privmix train`.")] = None,
    any_guarantee: Annotated[
        bool, typer.Option("--any-guarantee", help="Also show methods with published or data-dependent guarantees.")
    ] = False,
    user_field: UserFieldOption = "user",
    text_field: TextFieldOption = "text",
    as_json: JsonOption = False,
) -> None:
    """Search for the parts, q, radius and protocol with the best perplexity at a budget, and count their model rows.

    The exit status is 0 if there is a recommendation, 2 if the input is invalid or the sample is private, 1 if a task
    failed, and 130 if the command was interrupted. Run it again to continue.
    """
    typer.echo(WARNING, err=True)
    sample = Corpus(set_aside, user_field, text_field)
    users = None if private is None else Corpus(private, user_field, text_field)
    price, charged = _price(private, private_epsilon, ledger, ledger_epsilon)
    _check(sample, [path for path in (private_corpus, private) if path], private_ensemble, salt_file, ensemble)
    if users is not None:
        _check_held_out(users, private_ensemble, salt_file, ensemble)
    tuning = search(
        sample,
        output,
        TokenBudget(epsilon=epsilon, delta=delta, tokens=tokens),
        parts=parts,
        ensembles=ensemble,
        runs=runs,
        run_tokens=run_tokens,
        drawn=drawn,
        model=model,
        training=_TRAINING,
        any_guarantee=any_guarantee,
        display=partial(display, as_json),
    )
    text = to_json(tuning, indent=2, inf_nan_mode="null").decode()
    (output / "tuning.json").write_text(text)
    _plot(tuning, output / "tuning.png")
    chosen = None
    if users is not None:
        chosen = choose(
            tuning,
            users,
            output,
            epsilon=price,
            ledger=charged,
            budget=ledger_epsilon,
            display=partial(display, as_json),
        )
    if as_json:
        print(text if chosen is None else _with_choice(text, chosen))
        return
    _show(tuning, output)
    if chosen is not None:
        _show_choice(chosen, tuning)


def _price(
    private: Path | None, epsilon: float | None, ledger: str | None, ledger_epsilon: float | None
) -> tuple[float, str]:
    """Returns the price of a private choice and its ledger.

    Raises:
        InputError: one of them is missing, or there is no private choice to pay for.
    """
    options = {"private-epsilon": epsilon, "ledger": ledger, "ledger-epsilon": ledger_epsilon}
    if private is None:
        for name, value in options.items():
            if value is not None:
                raise InputError(
                    f"{name}: belongs to a choice on private users; give them with --private, or leave it out"
                )
        return 0.0, ""
    if epsilon is None or not 0 < epsilon < math.inf:
        raise InputError("private-epsilon: give the epsilon, above 0, that the choice on --private may cost")
    if ledger is None:
        raise InputError("ledger: give a ledger, which counts what choices on --private cost, such as choices.db")
    return epsilon, ledger


def _check_held_out(users: Corpus, deployed: Path | None, salt_file: Path | None, ensembles: Sequence[Path]) -> None:
    """Refuses held-out users whose text an ensemble contains, as far as this can be checked: it would favour them.

    Raises:
        InputError: a user or a text is in an ensemble, or its marks cannot be read.
    """
    documents = list(users)
    trained = [(directory, None) for directory in ensembles if (directory / SALT).exists()]
    for directory, salt in [*trained, *([(deployed, salt_file)] if deployed is not None else [])]:
        shared = _marks(directory, salt).overlap(documents)
        if shared:
            raise InputError(
                f"private: {shared.users} of its users and {shared.texts} of its {len(documents)} texts are in the "
                f"text that {directory} was trained on; choose on users who were held out"
            )


def _check(
    sample: Corpus, private: Sequence[Path], deployed: Path | None, salt_file: Path | None, ensembles: Sequence[Path]
) -> None:
    """Refuses a sample that shares users or texts with the private corpus, as far as this can be checked.

    Raises:
        InputError: the sample contains private text, or the corpus or its marks cannot be read.
    """
    documents = list(sample)
    for path in private:
        marks = Marks(secrets.token_bytes(32))
        for _ in marks.of(Corpus(path, sample.user_field, sample.text_field)):
            pass
        refuse_private(documents, marks, str(path))
    if deployed is not None:
        id_ = Manifest.load(deployed).ensemble
        for directory in ensembles:
            if Manifest.load(directory).ensemble == id_:
                raise InputError(
                    f"ensemble: {directory} is the deployed ensemble of private text; train one on other text"
                )
        refuse_private(documents, _marks(deployed, salt_file), f"the text that {deployed} was trained on")
    for directory in ensembles:
        if (directory / SALT).exists():
            refuse_private(documents, _marks(directory, None), f"the text that {directory} was trained on")


def _marks(directory: Path, salt_file: Path | None) -> Marks:
    path = salt_file or directory / SALT
    if not path.exists():
        raise InputError(f"salt {path}: does not exist; give the partition's salt (--salt-file)")
    return Marks.load(directory, read_salt(path))


def _show(tuning: Tuning, output: Path) -> None:
    shown, budget = console(), tuning.budget
    table = Table(
        "",
        "method",
        "guarantee",
        title=f"epsilon {stated(budget.epsilon)} at delta {budget.delta:g} for {budget.tokens} tokens; * is the front",
        title_justify="left",
    )
    for name in ("parts", "q", "rows per token", "perplexity", "95 %", "change"):
        table.add_column(name, justify="right")
    for choice in tuning.choices:
        if choice.on_front or choice.status == "certified":
            style = "bold" if choice == tuning.recommended else None
            table.add_row("*" if choice.on_front else "", *_cells(choice), style=style)
    shown.print(table)
    best = tuning.recommended
    settings = {"protocol": best.protocol, **best.parameters}
    shown.print(
        f"Recommended, the cheapest within {TOLERANCE:.0%} of the best certified perplexity: "
        f"{best.label} with {best.parts} parts."
        if best.protocol != "public"
        else "Recommended: the public model alone. No certified protocol is better by more than "
        f"{TOLERANCE:.0%} at this budget."
    )
    print(yaml.safe_dump({"privacy": settings | budget.model_dump()}, sort_keys=False), end="")
    shown.print(f"{output}: tuning.json and tuning.png contain all choices", style="dim")


def _show_choice(chosen: PrivateChoice, tuning: Tuning) -> None:
    shown = console()
    shown.print(
        f"Chosen on {chosen.users} private users among {len(chosen.candidates)} candidates: {chosen.label} with "
        f"{chosen.parts} parts, {chosen.ensemble}. This cost epsilon {stated(chosen.epsilon)}, delta 0, for any one of "
        "these users, provided that the sample and its ensembles contain no private text."
    )
    settings = {"protocol": chosen.protocol, **chosen.parameters}
    print(yaml.safe_dump({"privacy": settings | tuning.budget.model_dump()}, sort_keys=False), end="")


def _with_choice(text: str, chosen: PrivateChoice) -> str:
    return json.dumps({**json.loads(text), "private_choice": chosen.model_dump(mode="json")}, indent=2)


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


def _plot(tuning: Tuning, path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    for label in dict.fromkeys(choice.label for choice in tuning.choices):
        points = [(choice.rows, choice.perplexity.mean) for choice in tuning.choices if choice.label == label]
        axes.plot(*zip(*points, strict=True), "o", label=label, alpha=0.7)
    front = sorted(
        (choice.rows, choice.perplexity.mean)
        for choice in tuning.choices
        if choice.on_front and choice.status == "certified"
    )
    axes.step(*zip(*front, strict=True), where="post", color="gray", label="front, certified")
    best = tuning.recommended
    axes.plot(best.rows, best.perplexity.mean, "o", markersize=14, fillstyle="none", color="black", label="recommended")
    budget = tuning.budget
    axes.set(xlabel="model rows per token", ylabel="perplexity of the set-aside text")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"epsilon {stated(budget.epsilon)}, delta {budget.delta:g}, {budget.tokens} tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
