"""Implements `privmix compare`, which trains everything for a comparison from one corpus and runs it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from privmix.laboratory.evaluation.options import COMPARED_PARTS
from privmix.training.options import Resources, TrainingOptions
from privmix_cluster.commands.evaluate import ComparisonOptions
from privmix_cluster.console import display
from privmix_cluster.option_groups import grouped
from privmix_cluster.options import CorpusArgument, CorpusOptions, JsonOption

_QUICK_PARTS, _QUICK_TOKENS, _QUICK_DRAWN = (64, 16), 64, 16


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def _quick(compared: ComparisonOptions) -> ComparisonOptions:
    """Returns the options of a first look, apart from those that the command line sets."""
    tokens = _QUICK_TOKENS if compared.run_tokens is None else compared.run_tokens
    return replace(compared, run_tokens=tokens, drawn=compared.drawn or _QUICK_DRAWN, sweeps=[])


@grouped
def compare(
    corpus: CorpusArgument,
    reading: CorpusOptions,
    compared: ComparisonOptions,
    output: Annotated[Path, typer.Option(help="The directory for the split, the ensembles and the report.")],
    parts: Annotated[
        list[int] | None,
        typer.Option(
            help=f"A number of parts; repeat for more. Default: {_listed(COMPARED_PARTS)}; with --quick "
            f"{_listed(_QUICK_PARTS)}."
        ),
    ] = None,
    held_out: Annotated[float, typer.Option(help="The fraction of users to hold out.")] = 0.1,
    user_limit: Annotated[
        int | None, typer.Option(help="The maximum number of characters of each user to train on. Default: all.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The public model, as for `privmix train`.")] = None,
    part_kind: Annotated[
        str | None, typer.Option(help="What a part is, as for `privmix train`. Default: reader; with --quick text.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A first look in some minutes: parts without training, no fine-tuned model and no DP-SGD, "
            f"{_QUICK_TOKENS} tokens in a run, {_QUICK_DRAWN} parts scored at a position, no sweeps.",
        ),
    ] = False,
    on_base: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Also train the largest ensemble on a private base, which DP-SGD trains with this share of each "
            "epsilon. The rest pays for the tokens.",
        ),
    ] = None,
    cpus: Annotated[float, typer.Option(help="The number of CPU cores for each adapter in training.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Split a corpus by user, train ensembles of several sizes, and evaluate every method on the held-out users.

    If it is interrupted, run it again to continue. The result is for the operator only.
    """
    from privmix.laboratory.evaluation.compare import compare as compare_methods
    from privmix_cluster.work.evaluate import report

    started = time.monotonic()
    evaluation = compare_methods(
        reading.corpus(corpus),
        output,
        parts=parts or (_QUICK_PARTS if quick else COMPARED_PARTS),
        held_out=held_out,
        user_limit=user_limit,
        model=model,
        part_kind=TrainingOptions.checked(part_kind=part_kind or ("text" if quick else "reader")).part_kind,
        references=not quick,
        on_base=on_base,
        resources=Resources.checked(cpus=cpus),
        options=(_quick(compared) if quick else compared).checked(),
        display=partial(display, as_json),
    )
    report(evaluation, output, time.monotonic() - started, as_json)
