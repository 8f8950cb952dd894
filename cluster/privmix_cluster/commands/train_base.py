"""Implements `privmix train-base`, which trains one model with DP-SGD from a private corpus."""

import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import typer

from privmix.training.options import DpSgdOptions
from privmix_cluster.option_groups import grouped
from privmix_cluster.options import CorpusArgument, CorpusOptions
from privmix_cluster.training_options import RecipeOptions, RunOptions

_DEFAULTS = DpSgdOptions()
_guarantee_option = partial(typer.Option, rich_help_panel="Guarantee")


@dataclass(frozen=True)
class GuaranteeOptions:
    """The guarantee of DP-SGD and its mechanism, as `DpSgdOptions` has them."""

    epsilon: Annotated[float, _guarantee_option(help="The epsilon of the training.")] = _DEFAULTS.epsilon
    delta: Annotated[float, _guarantee_option(help="The delta of the training.")] = _DEFAULTS.delta
    unit: Annotated[str, _guarantee_option(help="The protected unit, record or user; a base needs user.")] = (
        _DEFAULTS.unit
    )
    clip: Annotated[float, _guarantee_option(help="The clipping norm of each unit's gradient.")] = _DEFAULTS.clip
    blocks: Annotated[int, _guarantee_option(help="The maximum number of blocks of each unit's text.")] = (
        _DEFAULTS.blocks
    )
    steps: Annotated[int, _guarantee_option(help="The number of steps.")] = _DEFAULTS.steps
    expected_batch: Annotated[
        int | None,
        _guarantee_option(help="The average number of units in a step; needs --population. Default: all units."),
    ] = None
    population: Annotated[
        int | None, _guarantee_option(help="The number of units as it is publicly known, for --expected-batch.")
    ] = None


@grouped
def train_base(
    corpus: CorpusArgument,
    run: RunOptions,
    guarantee: GuaranteeOptions,
    reading: CorpusOptions,
    recipe: RecipeOptions,
) -> None:
    """Fine-tune one adapter on the whole private corpus with DP-SGD, to serve it or to train parts on it.

    The exit status is 0 if the training is complete, 2 if the input is invalid, 1 if training failed, and 130 if the
    command was interrupted. Run it again to continue.
    """
    from privmix_cluster.work import train as work

    started = time.monotonic()
    documents = reading.corpus(corpus)
    private = DpSgdOptions.checked(**asdict(guarantee))
    trained = work.train_base(documents, run, recipe.given(), private)
    work.report_training(trained, run, time.monotonic() - started)
