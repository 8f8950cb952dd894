"""Does the work of `privmix tune`."""

import json
import math
import secrets
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.table import Table

from privmix.foundation.errors import InputError
from privmix.laboratory.evaluation.private_choice import PrivateChoice
from privmix.laboratory.evaluation.tuning import TOLERANCE, Tuning, TuningResult, refuse_private
from privmix.privacy.accounting import stated
from privmix.training.corpus import Corpus
from privmix.training.directory import SALT
from privmix.training.manifest import Manifest
from privmix.training.marks import Marks
from privmix.training.partition import read_salt
from privmix_cluster.console import console


def price_of_choice(
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


def check_held_out(users: Corpus, deployed: Path | None, salt_file: Path | None, ensembles: Sequence[Path]) -> None:
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


def check_sample(
    sample: Corpus, private: Sequence[Path], deployed: Path | None, salt_file: Path | None, ensembles: Sequence[Path]
) -> None:
    """Refuses a sample that shares users or texts with the private corpus, as far as this can be checked.

    Raises:
        InputError: the sample contains private text, or the corpus or its marks cannot be read.
    """
    documents = list(sample)
    for path in private:
        marks = Marks(secrets.token_bytes(32))
        for _ in marks.of(sample.beside(path)):
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


def show_tuning(tuning: Tuning, output: Path) -> None:
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
    if best.base is not None:
        shown.print(f"Train it with `privmix train --base auto --base-share {best.base / budget.epsilon:g}`.")
    print(yaml.safe_dump({"privacy": settings | budget.model_dump()}, sort_keys=False), end="")
    shown.print(f"{output}: tuning.json and tuning.png contain all choices", style="dim")


def show_choice(chosen: PrivateChoice, tuning: Tuning) -> None:
    shown = console()
    shown.print(
        f"Chosen on {chosen.users} private users among {len(chosen.candidates)} candidates: {chosen.label} with "
        f"{chosen.parts} parts, {chosen.ensemble}. This cost epsilon {stated(chosen.epsilon)}, delta 0, for any one of "
        "these users, provided that the sample and its ensembles contain no private text."
    )
    settings = {"protocol": chosen.protocol, **chosen.parameters}
    print(yaml.safe_dump({"privacy": settings | tuning.budget.model_dump()}, sort_keys=False), end="")


def with_choice(text: str, chosen: PrivateChoice) -> str:
    return json.dumps({**json.loads(text), "private_choice": chosen.model_dump(mode="json")}, indent=2)


def _cells(choice: TuningResult) -> tuple[str, ...]:
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


def plot_tuning(tuning: Tuning, path: Path) -> None:
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
