"""Implements `privmix train`, which trains an ensemble of adapters from a private corpus."""

import time
from pathlib import Path
from typing import Annotated

import typer

from cluster.console import display
from cluster.option_file import use_options
from cluster.options import (
    CorpusArgument,
    ProgressJsonOption,
    SkipBadOption,
    SplitOption,
    TextFieldOption,
    UserFieldOption,
)
from cluster.parameters import bad, count
from services.training.options import (
    AUTO_BASE,
    DP_SGD_TRAINING,
    PLAIN_TARGETS,
    DpSgdOptions,
    Resources,
    TrainingOptions,
)

_PRIVATE = DpSgdOptions()

_PARTS = "Parts"
_MODEL = "Model"
_KIND = "What a part is"
_OPTIMISER = "Optimiser"
_RESOURCES = "Resources"
_GUARANTEE = "Budget and DP-SGD"


def _default(name: str) -> str:
    """Describes the default of an option, without and with --dp-sgd."""
    usual, private = (
        ",".join(value) if isinstance(value := getattr(options, name), tuple) else str(value)
        for options in (TrainingOptions(), DP_SGD_TRAINING)
    )
    return f"Default: {usual}." if usual == private else f"Default: {usual}; with --dp-sgd {private}."


def train(
    corpus: CorpusArgument,
    output: Annotated[Path, typer.Option(help="The ensemble's directory. An interrupted training continues there.")],
    parts: Annotated[
        int | None,
        typer.Option(
            help="The number of parts, each with its own adapter. Default: the number of parts in --output, or else "
            "the proposal of `privmix plan` for --users and --tokens-per-user at --epsilon, --delta and --tokens.",
            rich_help_panel=_PARTS,
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="USERS",
            help="About how many users the corpus has, to propose --parts. The number is rounded and becomes public; "
            "privmix does not count the users, because the count would reveal whether a person is among them.",
            rich_help_panel=_PARTS,
        ),
    ] = None,
    tokens_per_user: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="TOKENS",
            help="About how many tokens a user's text has, in the same way for --users.",
            rich_help_panel=_PARTS,
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            parser=count,
            metavar="TOKENS",
            help="The number of tokens that the budget must last for, for the proposal of parts.",
            rich_help_panel=_PARTS,
        ),
    ] = 1024,
    halves: Annotated[
        bool,
        typer.Option(
            "--halves",
            help="Also train two adapters for each part, on the halves of its users. SubMix needs them. Training "
            "again without this option removes them.",
            rich_help_panel=_PARTS,
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="The public model: a directory or hub id. Default: smollm2-135m.", rich_help_panel=_MODEL),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY",
            help="A directory from `train --dp-sgd`, whose model the parts are trained on instead of a public one. "
            "The service charges both. With --earlier and the same directory, no user is in both. `auto` trains it "
            "first, from the same corpus into OUTPUT/base, with --base-share of --epsilon.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    base_share: Annotated[
        float | None,
        typer.Option(
            help="The share of --epsilon that --base auto spends on the base. Default: the best by `privmix plan` for "
            "--users, --tokens-per-user and --tokens.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    user_field: UserFieldOption = "user",
    text_field: TextFieldOption = "text",
    split: SplitOption = None,
    skip_bad: SkipBadOption = False,
    salt_file: Annotated[
        Path | None,
        typer.Option(
            help="The secret of the partition, created on first use. Default: in the output directory.",
            rich_help_panel=_PARTS,
        ),
    ] = None,
    earlier: Annotated[
        list[Path],
        typer.Option(
            help="An earlier ensemble; repeat for more. Documents of its users are left out, so that both can be "
            "cohorts of one model: each user is in one of them.",
            rich_help_panel=_PARTS,
        ),
    ] = [],  # noqa: B006
    part_kind: Annotated[
        str | None,
        typer.Option(
            help="What a part is: an adapter that attends to the public model's keys and values (reader), plain LoRA "
            "with its own (lora), which is not served in parts, or, without training, the start of its users' text, "
            f"which the public model reads before each sequence (text). {_default('part_kind')}",
            rich_help_panel=_KIND,
        ),
    ] = None,
    text: Annotated[
        int | None,
        typer.Option(
            help=f"The number of tokens of a part's text with --part-kind text. {_default('text')}",
            rich_help_panel=_KIND,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            help="The number of last layers that a part changes, with --part-kind reader. Fewer cost less to train, to "
            "store and to serve. Default: half of the public model's.",
            rich_help_panel=_KIND,
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(help=f"LoRA rank. {_default('rank')}", rich_help_panel=_KIND)] = None,
    alpha: Annotated[int | None, typer.Option(help=f"LoRA alpha. {_default('alpha')}", rich_help_panel=_KIND)] = None,
    dropout: Annotated[
        float | None, typer.Option(help=f"LoRA dropout. {_default('dropout')}", rich_help_panel=_KIND)
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help=f"Modules to adapt, separated by commas. {_default('targets')} "
            f"With --part-kind lora: {','.join(PLAIN_TARGETS)}.",
            rich_help_panel=_KIND,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="The initial learning rate, which falls linearly to 0. Default: 1e-3, times sqrt(24 / steps) with "
            f"more than 24 steps; with --dp-sgd {DP_SGD_TRAINING.learning_rate:g}.",
            rich_help_panel=_OPTIMISER,
        ),
    ] = None,
    warm_up: Annotated[
        float | None,
        typer.Option(
            help=f"The share of the steps in which the learning rate rises from 0. {_default('warm_up')}",
            rich_help_panel=_OPTIMISER,
        ),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(help=f"The weight decay of AdamW. {_default('weight_decay')}", rich_help_panel=_OPTIMISER),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help=f"The number of passes over the text. {_default('epochs')}", rich_help_panel=_OPTIMISER),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help=f"The number of blocks in a step. {_default('batch')}", rich_help_panel=_OPTIMISER),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(help=f"The number of tokens in a block. {_default('block')}", rich_help_panel=_OPTIMISER),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help=f"The precision of the public model: auto, bfloat16 or float32. {_default('precision')}",
            rich_help_panel=_OPTIMISER,
        ),
    ] = None,
    cpus: Annotated[
        float,
        typer.Option(
            help="The number of CPU cores for each adapter. More cores train fewer at a time.",
            rich_help_panel=_RESOURCES,
        ),
    ] = 1,
    gpus: Annotated[
        float | None,
        typer.Option(
            help="The number of GPUs for each adapter, such as 0.25. Default: 1 if the cluster has any.",
            rich_help_panel=_RESOURCES,
        ),
    ] = None,
    privately: Annotated[
        bool,
        typer.Option(
            "--dp-sgd",
            help="Train one adapter on the whole corpus with DP-SGD, instead of parts.",
            rich_help_panel=_GUARANTEE,
        ),
    ] = False,
    epsilon: Annotated[
        float,
        typer.Option(
            help="The epsilon of DP-SGD, or of the budget for the proposal of parts.", rich_help_panel=_GUARANTEE
        ),
    ] = _PRIVATE.epsilon,
    delta: Annotated[
        float,
        typer.Option(
            help="The delta of DP-SGD, or of the budget for the proposal of parts.", rich_help_panel=_GUARANTEE
        ),
    ] = _PRIVATE.delta,
    unit: Annotated[
        str, typer.Option(help="DP-SGD: the protected unit, record or user.", rich_help_panel=_GUARANTEE)
    ] = _PRIVATE.unit,
    clip: Annotated[
        float, typer.Option(help="DP-SGD: the clipping norm of each unit's gradient.", rich_help_panel=_GUARANTEE)
    ] = _PRIVATE.clip,
    blocks: Annotated[
        int, typer.Option(help="DP-SGD: the maximum number of blocks of each unit's text.", rich_help_panel=_GUARANTEE)
    ] = (_PRIVATE.blocks),
    steps: Annotated[
        int, typer.Option(help="DP-SGD: the number of steps. It replaces --epochs.", rich_help_panel=_GUARANTEE)
    ] = _PRIVATE.steps,
    warm_start: Annotated[
        Path | None,
        typer.Option(
            help="DP-SGD, also of --base auto: public text of the same kind, of nobody in the corpus, in the same "
            "form. The adapter is trained on it first, at no cost.",
            rich_help_panel=_GUARANTEE,
        ),
    ] = None,
    expected_batch: Annotated[
        int | None,
        typer.Option(
            help="DP-SGD: the average number of units in a step; needs --population. Default: all units.",
            rich_help_panel=_GUARANTEE,
        ),
    ] = None,
    population: Annotated[
        int | None,
        typer.Option(
            help="DP-SGD: the number of units as it is publicly known, for --expected-batch.",
            rich_help_panel=_GUARANTEE,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file of options by name, such as `rank: 8`. The command line has precedence.",
            callback=use_options,
            is_eager=True,
        ),
    ] = None,
    as_json: ProgressJsonOption = False,
) -> None:
    """Fine-tune one adapter on each part of a private corpus, or one adapter on the whole corpus with --dp-sgd.

    The exit status is 0 if the ensemble is complete, 2 if the input is invalid, 1 if training failed, and 130 if the
    command was interrupted. Run it again to continue.
    """
    from cluster.work.train import (
        auto_epsilon,
        check_base,
        default_parts,
        earlier_size,
        given_parts,
        report_training,
        train_base,
    )
    from services.training import dp_sgd
    from services.training import train as ensemble
    from services.training.corpus import Corpus
    from services.training.manifest import StatedSize
    from services.training.plan import run_training

    started = time.monotonic()
    documents = Corpus(corpus, user_field, text_field, skip_bad, split)
    chosen = {
        "part_kind": part_kind,
        "text": text,
        "layers": layers,
        "rank": rank,
        "alpha": alpha,
        "dropout": dropout,
        "targets": None if targets is None else tuple(name.strip() for name in targets.split(",") if name.strip()),
        "learning_rate": learning_rate,
        "warm_up": warm_up,
        "weight_decay": weight_decay,
        "epochs": epochs,
        "batch": batch,
        "block": block,
        "precision": precision,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    if part_kind == "text" and (unused := given.keys() - {"part_kind", "text"}):
        raise bad(min(unused), "has no effect with --part-kind text, which trains nothing; leave it out")
    if part_kind != "text" and text is not None:
        raise bad("text", "has an effect only with --part-kind text")
    if layers is not None and (privately or part_kind == "lora"):
        raise bad("layers", "has an effect only with --part-kind reader; plain LoRA changes all layers")
    defaults = DP_SGD_TRAINING.model_dump() if privately else {}
    options = TrainingOptions.checked(**defaults | given)
    for name in ("batch", "epochs"):
        if privately and name in given:
            raise bad(name, "has no effect with --dp-sgd; choose --steps, and --expected-batch for smaller batches")
    if base_share is not None and base != AUTO_BASE:
        raise bad("base-share", "belongs to --base auto; add it")
    if warm_start is not None and not (privately or base == AUTO_BASE):
        raise bad("warm-start", "belongs to --dp-sgd or --base auto; add one of them")
    public = None if warm_start is None else Corpus(warm_start, user_field, text_field, skip_bad, split)
    if privately and earlier:
        raise bad("earlier", "is for ensembles of parts; leave it out with --dp-sgd")
    if users is not None and (privately or parts is not None):
        raise bad("users", "is for the proposal of --parts; leave it out")
    if tokens_per_user is not None and users is None:
        raise bad("tokens-per-user", "belongs to --users; add it")
    resources = Resources.checked(cpus=cpus, gpus=gpus)
    size = None if users is None else StatedSize.rounded(users, tokens_per_user)
    if base is not None:
        check_base(base, model, privately, earlier)
        if base == AUTO_BASE:
            spent = auto_epsilon(base_share, size, output / "base", parts, (epsilon, delta, tokens))
            guarantee = DpSgdOptions.checked(epsilon=spent, delta=delta)
            common = {name: value for name, value in given.items() if name in ("block", "precision")}
            base = str(
                train_base(documents, output / "base", guarantee, model, common, salt_file, resources, public, as_json)
            )
        model = base
    plan = (
        dp_sgd.plan(
            documents,
            output,
            private=DpSgdOptions.checked(
                unit=unit,
                epsilon=epsilon,
                delta=delta,
                clip=clip,
                blocks=blocks,
                steps=steps,
                expected_batch=expected_batch,
                population=population,
            ),
            model=model,
            options=options,
            salt_file=salt_file,
            warm_start=public,
        )
        if privately
        else ensemble.plan(
            documents,
            output,
            parts=default_parts(size, output, options, (epsilon, delta, tokens))
            if parts is None
            else given_parts(parts, output),
            earlier=earlier,
            stated=size or earlier_size(output, parts),
            halves=halves,
            model=model,
            options=options,
            salt_file=salt_file,
        )
    )
    shown = display(as_json)
    documents.report = shown.read
    trained = run_training(plan, resources, shown)
    report_training(trained, output, time.monotonic() - started, as_json)
