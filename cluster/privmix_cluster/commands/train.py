"""Implements `privmix train`, which trains an ensemble of adapters from a private corpus."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from privmix.foundation.units import DELTA, EPSILON, TOKENS
from privmix.training.options import AUTO_BASE, TrainingOptions
from privmix_cluster.option_groups import FieldsOf, Given, grouped
from privmix_cluster.options import MODEL, CorpusArgument, CorpusOptions, RunOptions
from privmix_cluster.parameters import bad, count

_parts_option = partial(typer.Option, rich_help_panel="Parts")
_model_option = partial(typer.Option, rich_help_panel=MODEL)


@dataclass(frozen=True)
class PartsOptions:
    """Says how many parts are trained, and from which users."""

    parts: Annotated[
        int | None,
        _parts_option(
            help="The number of parts, each with its own adapter. Default: the number of parts in --output, or else "
            "the proposal of `privmix plan` for --users and --tokens-per-user at --epsilon, --delta and --tokens."
        ),
    ] = None
    users: Annotated[
        int | None,
        _parts_option(
            parser=count,
            metavar="USERS",
            help="About how many users the corpus has, to propose --parts. The number is rounded and becomes public; "
            "privmix does not count the users, because the count would reveal whether a person is among them.",
        ),
    ] = None
    tokens_per_user: Annotated[
        int | None,
        _parts_option(
            parser=count, metavar="TOKENS", help="About how many tokens a user's text has, in the same way for --users."
        ),
    ] = None
    epsilon: Annotated[float, _parts_option(help="The epsilon of the budget, to propose --parts and --base-share.")] = (
        EPSILON
    )
    delta: Annotated[float, _parts_option(help="The delta of the budget.")] = DELTA
    tokens: Annotated[
        int, _parts_option(parser=count, metavar="TOKENS", help="The number of tokens that the budget must last for.")
    ] = TOKENS
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
            help="The share of --epsilon that --base auto spends on the base. Default: the best by `privmix plan` for "
            "--users, --tokens-per-user and --tokens."
        ),
    ] = None


RECIPE = {
    "What a part is": ("part_kind", "text", "layers"),
    "LoRA": ("rank", "alpha", "targets"),
    "Optimiser": ("learning_rate", "warm_up", "weight_decay", "epochs", "batch", "block", "precision"),
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
    from privmix.training.manifest import StatedSize
    from privmix.training.train import plan
    from privmix_cluster.work.plan import token_budget
    from privmix_cluster.work.train import (
        auto_base,
        auto_epsilon,
        check_base,
        earlier_size,
        given_parts,
        proposed_parts,
        report_training,
        run_plan,
    )

    started = time.monotonic()
    documents = reading.corpus(corpus)
    options = _checked(recipe)
    if below.base != AUTO_BASE and below.base_share is not None:
        raise bad("base-share", "belongs to --base auto; add it")
    if parts.users is not None and parts.parts is not None:
        raise bad("users", "is for the proposal of --parts; leave it out")
    if parts.tokens_per_user is not None and parts.users is None:
        raise bad("tokens-per-user", "belongs to --users; add it")
    budget = token_budget(parts.epsilon, parts.delta, parts.tokens)
    size = None if parts.users is None else StatedSize.rounded(parts.users, parts.tokens_per_user)
    if below.base is not None:
        check_base(below.base, run.model)
    number = (
        proposed_parts(size, run.output, options, budget)
        if parts.parts is None
        else given_parts(parts.parts, run.output)
    )
    model = below.base or run.model
    if below.base == AUTO_BASE:
        spent = auto_epsilon(below.base_share, size, run.output / "base", parts.parts, budget)
        model = str(auto_base(documents, run, recipe, spent, budget.delta))
    planned = plan(
        documents,
        run.output,
        parts=number,
        stated=size or earlier_size(run.output, parts.parts),
        halves=parts.halves,
        model=model,
        options=options,
        salt_file=run.salt_file,
    )
    report_training(run_plan(planned, documents, run), run, time.monotonic() - started)
