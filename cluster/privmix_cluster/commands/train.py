"""Implements `privmix train`, which trains an ensemble of adapters from a private corpus."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privmix.foundation.units import DELTA, EPSILON, TOKENS
from privmix.training.options import AUTO_BASE, DP_SGD_TRAINING, DpSgdOptions, TokenBudget, TrainingOptions
from privmix_cluster.console import display
from privmix_cluster.option_groups import FieldsOf, Given, grouped
from privmix_cluster.options import MODEL, CorpusArgument, CorpusOptions, RunOptions
from privmix_cluster.parameters import bad, count

if TYPE_CHECKING:
    from privmix.training.corpus import Corpus
    from privmix.training.plan import OpenPlan, Trained

_parts_option = partial(typer.Option, rich_help_panel="Parts")
_model_option = partial(typer.Option, rich_help_panel=MODEL)


@dataclass(frozen=True)
class PartsOptions:
    """Says how many parts are trained, and from which users."""

    parts: Annotated[
        int | None,
        _parts_option(
            help="The number of parts, each with its own adapter; `privmix plan --users` proposes it. It is public, so "
            "it is not taken from the corpus. Default: the number of parts in --output."
        ),
    ] = None
    halves: Annotated[
        bool,
        _parts_option(
            "--halves",
            help="Also train two adapters for each part, on the halves of its users. SubMix needs them. Training "
            "again without this option removes them.",
        ),
    ] = False


@dataclass(frozen=True)
class BaseOptions:
    """The private model that the parts are trained on."""

    base: Annotated[
        str | None,
        _model_option(
            metavar="DIRECTORY",
            help="A directory from `train-base`, whose model the parts are trained on instead of a public one. "
            "The service charges both. `auto` trains it "
            "first, from the same corpus into OUTPUT/base, with --base-share of --epsilon.",
        ),
    ] = None
    base_share: Annotated[
        float | None,
        _model_option(
            help="The share of --epsilon that --base auto spends on the base, as `privmix plan --users` finds it. "
            "Default: the best for parts of usual size."
        ),
    ] = None
    epsilon: Annotated[float, _model_option(help="With --base auto: the epsilon of the budget, base included.")] = (
        EPSILON
    )
    delta: Annotated[float, _model_option(help="With --base auto: the delta of the budget.")] = DELTA
    tokens: Annotated[
        int,
        _model_option(
            parser=count, metavar="TOKENS", help="With --base auto: the number of tokens that the budget must last for."
        ),
    ] = TOKENS


RECIPE = {
    "What a part is": ("part_kind", "text", "layers"),
    "LoRA": ("rank", "alpha", "targets"),
    "Optimiser": ("learning_rate", "weight_decay", "epochs", "batch", "block", "precision"),
}


def _checked(recipe: Given) -> TrainingOptions:
    """Returns the options of the training.

    Raises:
        typer.BadParameter: an option has no effect on parts of this kind.
        InputError: an option is invalid.
    """
    kind = recipe.get("part_kind")
    if kind == "text" and (unused := recipe.keys() - {"part_kind", "text"}):
        raise bad(min(unused), "has no effect with --part-kind text, which trains nothing; leave it out")
    if kind != "text" and "text" in recipe:
        raise bad("text", "has an effect only with --part-kind text")
    if kind == "lora" and "layers" in recipe:
        raise bad("layers", "has an effect only with --part-kind reader; plain LoRA changes all layers")
    return TrainingOptions.checked(**recipe)


@grouped
def train(
    corpus: CorpusArgument,
    run: RunOptions,
    parts: PartsOptions,
    below: BaseOptions,
    reading: CorpusOptions,
    recipe: Annotated[Given, FieldsOf(TrainingOptions(), RECIPE)],
) -> None:
    """Fine-tune one adapter on each part of a private corpus.

    The exit status is 0 if the ensemble is complete, 2 if the input is invalid, 1 if training failed, and 130 if the
    command was interrupted. Run it again to continue.
    """
    from privmix.training.train import plan

    started = time.monotonic()
    documents = reading.corpus(corpus)
    options = _checked(recipe)
    if below.base != AUTO_BASE and below.base_share is not None:
        raise bad("base-share", "belongs to --base auto; add it")
    if below.base is not None:
        _check_base(below.base, run.model)
    number, model = _number_of_parts(parts.parts, run.output), below.base or run.model
    if below.base == AUTO_BASE:
        budget = TokenBudget.checked(epsilon=below.epsilon, delta=below.delta, tokens=below.tokens)
        spent = _auto_epsilon(below.base_share, run.output / "base", number, budget)
        model = str(_auto_base(documents, run, recipe, spent, budget.delta))
    planned = plan(
        documents,
        run.output,
        parts=number,
        halves=parts.halves,
        model=model,
        options=options,
        salt_file=run.salt_file,
    )
    report_training(run_plan(planned, run), run, time.monotonic() - started)


def _number_of_parts(parts: int | None, output: Path) -> int:
    """Returns the given number, or that of the ensemble in `output`.

    It says so on stderr if a ledger of the ensemble may not accept the number.
    """
    from privmix.budget.receipt import FILE as RECEIPT
    from privmix.training.manifest import FILE as MANIFEST
    from privmix.training.manifest import Manifest

    before = len(Manifest.load(output).parts) if (output / MANIFEST).exists() else None
    if parts is None and before is None:
        raise bad(
            "parts",
            "is missing; `privmix plan --users` proposes it for about so many users. The number of parts is public, so "
            "it is not taken from the corpus",
        )
    if parts is not None and before not in (None, parts) and (output / RECEIPT).exists():
        typer.echo(
            f"parts: {output} has {before} parts and a ledger. A ledger that charges each part for itself "
            "(protocol individual, measured losses) refuses another number, because it gives users other parts. To "
            "keep such a ledger, leave --parts out.",
            err=True,
        )
    return parts or before or 0


def _check_base(base: str, model: str | None) -> None:
    """Raises `typer.BadParameter` if parts cannot be trained on this base."""
    from privmix.training.manifest import Manifest

    if base == AUTO_BASE:
        return
    if model is not None:
        raise bad("base", "is the model that the parts are trained on; leave --model out")
    if Manifest.load(Path(base)).dp_sgd is None:
        raise bad("base", f"{base} was not trained with DP-SGD; train a base with `privmix train-base`")


def _auto_epsilon(
    share: float | None,
    output: Path,
    parts: int,
    budget: TokenBudget,
) -> float:
    """Returns the epsilon of the base of `--base auto`: a share of the promised one, or what a finished base cost.

    Raises:
        typer.BadParameter: a finished base leaves nothing of epsilon.
        InputError: there is no share (`base_share`).
    """
    from privmix.privacy.accounting import stated
    from privmix.training.manifest import FILE as MANIFEST
    from privmix.training.manifest import Manifest
    from privmix.training.splitting import base_share

    epsilon = budget.epsilon
    if share is not None:
        return share * epsilon
    if (output / MANIFEST).exists() and (trained := Manifest.load(output).dp_sgd) is not None:
        if trained.epsilon >= epsilon:
            raise bad("epsilon", f"must be above the {stated(trained.epsilon)} that the base in {output} cost")
        return trained.epsilon
    share = base_share(parts, budget)
    typer.echo(
        f"base-share: {share:g} of epsilon {stated(epsilon)} for the base, the rest for {budget.tokens:,} tokens. "
        "`privmix plan --users` finds it for a corpus; --base-share sets it.",
        err=True,
    )
    return share * epsilon


def _auto_base(
    corpus: "Corpus",
    run: RunOptions,
    recipe: Mapping[str, object],
    epsilon: float,
    delta: float,
) -> Path:
    """Trains the base of `--base auto` by the default recipe, or keeps the finished one; returns its directory."""
    chosen = {name: value for name, value in recipe.items() if name in ("block", "precision")}
    below = replace(run, output=run.output / "base")
    train_model(corpus, below, chosen, DpSgdOptions.checked(epsilon=epsilon, delta=delta))
    return below.output


def train_model(corpus: "Corpus", run: RunOptions, given: Mapping[str, object], private: DpSgdOptions) -> "Trained":
    """Trains one adapter with DP-SGD, or keeps the finished one.

    Args:
        given: what differs from the default recipe.

    Raises:
        InputError: an argument is invalid.
        WorkError: the training failed, or another one is writing to the directory.
    """
    from privmix.training import dp_sgd

    plan = dp_sgd.plan(
        corpus,
        run.output,
        private=private,
        model=run.model,
        options=TrainingOptions.checked(**DP_SGD_TRAINING.model_dump() | dict(given)),
        salt_file=run.salt_file,
    )
    return run_plan(plan, run)


def run_plan(plan: "OpenPlan", run: RunOptions) -> "Trained":
    """Trains what is missing, and shows the progress."""
    from privmix.training.plan import run_training

    return run_training(plan, run.resources, display())


def report_training(trained: "Trained", run: RunOptions, seconds: float) -> None:
    from privmix.privacy.accounting import stated
    from privmix.training.corpus import kinds

    if run.as_json:
        summary = {
            "ensemble": trained.manifest.ensemble,
            "output": str(run.output),
            "parts": len(trained.manifest.parts),
            "adapters": len(trained.manifest.adapters),
            "trained": trained.trained,
            "kept": trained.kept,
            "skipped": sum(trained.skipped.values()),
            "skipped_by_kind": dict(trained.skipped),
            "seconds": round(seconds, 1),
        }
        if trained.manifest.private_base:
            summary["private_base"] = trained.manifest.private_base.model_dump(mode="json")
        if trained.manifest.dp_sgd:
            summary["dp_sgd"] = trained.manifest.dp_sgd.model_dump(mode="json")
        typer.echo(json.dumps(summary))
    else:
        kind, done = ("texts", "written") if trained.manifest.part_kind == "text" else ("adapters", "trained")
        typer.echo(
            f"{run.output}: {len(trained.manifest.parts)} parts, {len(trained.manifest.adapters)} {kind}, "
            f"{trained.trained} of them {done} and {trained.kept} kept, "
            f"{sum(trained.skipped.values())} bad rows skipped, in {seconds:.0f} s"
        )
        if trained.skipped:
            typer.echo(f"skipped: {kinds(trained.skipped)}. These numbers are private: they depend on users' rows")
        if trained.manifest.private_base:
            training = trained.manifest.private_base.training
            typer.echo(
                f"the parts are on a private base, which cost epsilon {stated(training.epsilon)} at delta "
                f"{training.delta:g}; a service charges it once"
            )
        if private := trained.manifest.dp_sgd:
            typer.echo(private.event.guarantee.sentence(stated(private.epsilon), private.delta, None))
