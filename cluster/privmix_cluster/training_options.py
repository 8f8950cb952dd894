"""Declares the options that `privmix train` and `privmix train-base` share, in groups."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from privmix.training.options import DP_SGD_TRAINING, Resources, TrainingOptions
from privmix_cluster.options import ProgressJsonOption

MODEL = "Model"
LORA = "LoRA"
OPTIMISER = "Optimiser"
_RESOURCES = "Resources"


@dataclass(frozen=True)
class RunOptions:
    """Where a training reads and writes, on what, and how it reports."""

    output: Annotated[
        Path, typer.Option(help="The directory of what is trained. An interrupted training continues there.")
    ]
    salt_file: Annotated[
        Path | None,
        typer.Option(help="The secret of the partition, created on first use. Default: in the output directory."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="The public model: a directory or hub id. Default: smollm2-135m.", rich_help_panel=MODEL),
    ] = None
    cpus: Annotated[
        float,
        typer.Option(
            help="The number of CPU cores for each adapter. More cores train fewer at a time.",
            rich_help_panel=_RESOURCES,
        ),
    ] = 1
    gpus: Annotated[
        float | None,
        typer.Option(
            help="The number of GPUs for each adapter, such as 0.25. Default: 1 if the cluster has any.",
            rich_help_panel=_RESOURCES,
        ),
    ] = None
    as_json: ProgressJsonOption = False

    @property
    def resources(self) -> Resources:
        """The resources of an adapter. Raises `InputError` if they are invalid."""
        return Resources.checked(cpus=self.cpus, gpus=self.gpus)


def defaulting(options: TrainingOptions, name: str, text: str, panel: str) -> OptionInfo:
    """Returns an option of a training, whose help tells its default."""
    value = getattr(options, name)
    shown = ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else value
    option: OptionInfo = typer.Option(help=f"{text} Default: {shown}.", rich_help_panel=panel)
    return option


_private = partial(defaulting, DP_SGD_TRAINING)
TARGETS = "Modules to adapt, separated by commas."
LEARNING_RATE = "The initial learning rate, which falls linearly to 0."
WEIGHT_DECAY = "The weight decay of AdamW."
_WARM_UP = "The share of the steps in which the learning rate rises from 0."
_PRECISION = "The precision of the public model: auto, bfloat16 or float32."


@dataclass(frozen=True)
class RecipeOptions:
    """What DP-SGD trains and how. None stands for the default."""

    rank: Annotated[int | None, _private("rank", "LoRA rank.", LORA)] = None
    alpha: Annotated[int | None, _private("alpha", "LoRA alpha.", LORA)] = None
    targets: Annotated[str | None, _private("targets", TARGETS, LORA)] = None
    learning_rate: Annotated[float | None, _private("learning_rate", LEARNING_RATE, OPTIMISER)] = None
    warm_up: Annotated[float | None, _private("warm_up", _WARM_UP, OPTIMISER)] = None
    weight_decay: Annotated[float | None, _private("weight_decay", WEIGHT_DECAY, OPTIMISER)] = None
    block: Annotated[int | None, _private("block", "The number of tokens in a block.", OPTIMISER)] = None
    precision: Annotated[str | None, _private("precision", _PRECISION, OPTIMISER)] = None

    def given(self) -> dict[str, Any]:
        """Returns what the command line sets, as `TrainingOptions` takes it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.targets is not None:
            values["targets"] = tuple(name.strip() for name in self.targets.split(",") if name.strip())
        return {name: value for name, value in values.items() if value is not None}
