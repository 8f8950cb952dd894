"""Implements `privmix train`, which trains an ensemble of adapters from a private corpus."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from cluster.console import display
from cluster.options import ProgressJsonOption, SkipBadOption, TextFieldOption, UserFieldOption
from cluster.parameters import bad, count
from services.errors import InputError
from services.evaluation.expectation import Requirements, measure, propose
from services.evaluation.methods import Budget
from services.privacy.accounting import stated
from services.training import dp_sgd
from services.training import train as ensemble
from services.training.base import find_base
from services.training.cohorts import OtherUsers
from services.training.corpus import Corpus
from services.training.manifest import FILE as MANIFEST
from services.training.manifest import Manifest
from services.training.options import DP_SGD_TRAINING, PLAIN_TARGETS, DpSgdOptions, Resources, TrainingOptions
from services.training.plan import Trained, carry_out

_PRIVATE = DpSgdOptions()


def _default(name: str) -> str:
    """Describes the default of an option, without and with --dp-sgd."""
    usual, private = (
        ",".join(value) if isinstance(value := getattr(options, name), tuple) else str(value)
        for options in (TrainingOptions(), DP_SGD_TRAINING)
    )
    return f"Default: {usual}." if usual == private else f"Default: {usual}; with --dp-sgd {private}."


def train(
    corpus: Annotated[Path, typer.Argument(help="JSON Lines file, or a Hugging Face dataset directory.")],
    output: Annotated[Path, typer.Option(help="The ensemble's directory. An interrupted training continues there.")],
    parts: Annotated[
        int | None,
        typer.Option(
            help="The number of parts, each with its own adapter. Default: the number of parts in --output, or else "
            "the proposal of `privmix plan --users` for the corpus at --epsilon, --delta and --tokens."
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            parser=count,
            metavar="TOKENS",
            help="The number of tokens that the budget must last for, for the proposal of parts.",
        ),
    ] = 1024,
    halves: Annotated[
        bool,
        typer.Option(
            "--halves",
            help="Also train two adapters for each part, on the halves of its users. SubMix needs them. Training "
            "again without this option removes them.",
        ),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="The public model: a directory or hub id. Default: smollm2-135m.")
    ] = None,
    user_field: UserFieldOption = "user",
    text_field: TextFieldOption = "text",
    skip_bad: SkipBadOption = False,
    salt_file: Annotated[
        Path | None,
        typer.Option(help="The secret of the partition, created on first use. Default: in the output directory."),
    ] = None,
    earlier: Annotated[
        list[Path],
        typer.Option(
            help="An earlier ensemble; repeat for more. Documents of its users are left out, so that both can be "
            "cohorts of one model: each user is in one of them."
        ),
    ] = [],  # noqa: B006
    attention: Annotated[
        str | None,
        typer.Option(
            help="What a part is: an adapter that attends to the public model's keys and values (public), plain LoRA "
            "with its own (own), which is not served in parts, or, without any training, the start of its users' text, "
            f"which the public model reads before each sequence (text). {_default('attention')}"
        ),
    ] = None,
    text: Annotated[
        int | None,
        typer.Option(help=f"The number of tokens of a part's text with --attention text. {_default('text')}"),
    ] = None,
    rank: Annotated[int | None, typer.Option(help=f"LoRA rank. {_default('rank')}")] = None,
    alpha: Annotated[int | None, typer.Option(help=f"LoRA alpha. {_default('alpha')}")] = None,
    dropout: Annotated[float | None, typer.Option(help=f"LoRA dropout. {_default('dropout')}")] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help=f"Modules to adapt, separated by commas. {_default('targets')} "
            f"With --attention own: {','.join(PLAIN_TARGETS)}."
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="The initial learning rate, which falls linearly to 0. Default: 1e-3, times sqrt(24 / steps) with "
            "more than 24 steps; with --dp-sgd 2e-4."
        ),
    ] = None,
    warm_up: Annotated[
        float | None,
        typer.Option(help=f"The share of the steps in which the learning rate rises from 0. {_default('warm_up')}"),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help=f"The weight decay of AdamW. {_default('weight_decay')}")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help=f"The number of passes over the text. {_default('epochs')}")
    ] = None,
    batch: Annotated[int | None, typer.Option(help=f"The number of blocks in a step. {_default('batch')}")] = None,
    block: Annotated[int | None, typer.Option(help=f"The number of tokens in a block. {_default('block')}")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help=f"The precision of the public model: auto, bfloat16 or float32. {_default('precision')}"),
    ] = None,
    cpus: Annotated[
        float, typer.Option(help="The number of CPU cores for each adapter. More cores train fewer at a time.")
    ] = 1,
    gpus: Annotated[
        float | None,
        typer.Option(help="The number of GPUs for each adapter, such as 0.25. Default: 1 if the cluster has any."),
    ] = None,
    privately: Annotated[
        bool,
        typer.Option("--dp-sgd", help="Train one adapter on the whole corpus with DP-SGD, instead of parts."),
    ] = False,
    epsilon: Annotated[
        float, typer.Option(help="The epsilon of DP-SGD, or of the budget for the proposal of parts.")
    ] = _PRIVATE.epsilon,
    delta: Annotated[
        float, typer.Option(help="The delta of DP-SGD, or of the budget for the proposal of parts.")
    ] = _PRIVATE.delta,
    unit: Annotated[str, typer.Option(help="DP-SGD: the protected unit, record or user.")] = _PRIVATE.unit,
    clip: Annotated[float, typer.Option(help="DP-SGD: the clipping norm of each unit's gradient.")] = _PRIVATE.clip,
    blocks: Annotated[int, typer.Option(help="DP-SGD: the maximum number of blocks of each unit's text.")] = (
        _PRIVATE.blocks
    ),
    expected_batch: Annotated[
        int, typer.Option(help="DP-SGD: the average number of units in a step. It replaces --batch.")
    ] = (_PRIVATE.expected_batch),
    population: Annotated[
        int | None,
        typer.Option(
            help="DP-SGD: the number of units to plan for. Default: their actual number, which becomes public."
        ),
    ] = None,
    as_json: ProgressJsonOption = False,
) -> None:
    """Fine-tune one adapter on each part of a private corpus, or one adapter on the whole corpus with --dp-sgd.

    The exit status is 0 if the ensemble is complete, 2 if the input is invalid, 1 if training failed, and 130 if the
    command was interrupted. Run it again to continue.
    """
    started = time.monotonic()
    documents = Corpus(corpus, user_field, text_field, skip_bad)
    chosen = {
        "attention": attention,
        "text": text,
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
    if attention == "text" and (unused := given.keys() - {"attention", "text"}):
        raise bad(min(unused), "has no effect with --attention text, which trains nothing; leave it out")
    if attention != "text" and text is not None:
        raise bad("text", "has an effect only with --attention text")
    defaults = DP_SGD_TRAINING.model_dump() if privately else {}
    options = TrainingOptions.checked(**defaults | given)
    if privately and earlier:
        raise bad("earlier", "is for ensembles of parts; leave it out with --dp-sgd")
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
                expected_batch=expected_batch,
                population=population,
            ),
            model=model,
            options=options,
            salt_file=salt_file,
        )
        if privately
        else ensemble.plan(
            documents,
            output,
            parts=_proposed(OtherUsers(documents, earlier), output, model, options, (epsilon, delta, tokens))
            if parts is None
            else parts,
            earlier=earlier,
            halves=halves,
            model=model,
            options=options,
            salt_file=salt_file,
        )
    )
    (trained,) = carry_out([plan], Resources.checked(cpus=cpus, gpus=gpus), display(as_json))
    _report(trained, output, time.monotonic() - started, as_json)


def _proposed(
    corpus: OtherUsers, output: Path, model: str | None, options: TrainingOptions, promise: tuple[float, float, int]
) -> int:
    """Returns the default number of parts: that of the ensemble in `output`, or else the proposal for the corpus."""
    if (output / MANIFEST).exists():
        return len(Manifest.load(output).parts)
    epsilon, delta, tokens = promise
    try:
        budget = Budget(epsilon=epsilon, delta=delta, tokens=tokens)
    except ValidationError as error:
        first = error.errors()[0]
        raise bad(str(first["loc"][0]), f"{first['msg']}, got {first['input']}") from error
    population = measure(corpus, find_base(model, options.block).path)
    if population.users == 0:
        raise InputError("corpus: has no documents, or only those of users of earlier ensembles")
    proposal = propose(Requirements(population, budget, attention=options.attention))
    parts = proposal.protocol.parts
    typer.echo(
        f"parts: {parts}, proposed for {population.users:,} users and about {population.tokens:,} tokens at epsilon "
        f"{stated(epsilon)}, delta {delta:g}, {tokens:,} tokens. The number of parts is public and reveals roughly the "
        "number of users; --parts sets another number.",
        err=True,
    )
    better = propose(Requirements(population, budget))
    if better.gain and proposal.gain and better.gain.mean > proposal.gain.mean:
        typer.echo(
            f"--attention {better.attention} is expected to gain more: {better.gain.mean:.2f} nats per token with "
            f"{better.protocol.parts} parts instead of {proposal.gain.mean:.2f}, by `privmix plan --users`.",
            err=True,
        )
    return parts


def _report(trained: Trained, output: Path, seconds: float, as_json: bool) -> None:
    if as_json:
        summary = {
            "ensemble": trained.manifest.ensemble,
            "output": str(output),
            "parts": len(trained.manifest.parts),
            "adapters": len(trained.manifest.adapters),
            "trained": trained.trained,
            "kept": trained.kept,
            "skipped": trained.skipped,
            "left_out": trained.left_out,
            "seconds": round(seconds, 1),
        }
        if trained.manifest.dp_sgd:
            summary["dp_sgd"] = trained.manifest.dp_sgd.model_dump(mode="json")
        typer.echo(json.dumps(summary))
    else:
        kind, done = ("texts", "written") if trained.manifest.attention == "text" else ("adapters", "trained")
        typer.echo(
            f"{output}: {len(trained.manifest.parts)} parts, {len(trained.manifest.adapters)} {kind}, "
            f"{trained.trained} of them {done} and {trained.kept} kept, "
            f"{trained.skipped} bad lines skipped, in {seconds:.0f} s"
        )
        if trained.manifest.disjoint_from:
            typer.echo(f"{trained.left_out} documents of users of earlier ensembles were left out")
        if private := trained.manifest.dp_sgd:
            typer.echo(private.event.guarantee.sentence(stated(private.epsilon), private.delta, None))
