"""Defines the options and the resources of a training."""

import math
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from privmix.engine import PartKind
from privmix.foundation.errors import InputError
from privmix.foundation.options import Options
from privmix.foundation.units import DELTA, EPSILON, MIN_CLIP

READER_TARGETS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules that a reader may change."""
PLAIN_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_RATE, _STEPS = 1e-3, 24
_FEWEST_STEPS = 6
"""With so few steps a reader has its largest rate."""


class TrainingOptions(Options):
    """Configures LoRA and its optimiser. tests/benchmarks/README.md has the measurements behind the defaults.

    Choose every field before reading the corpus: values tuned on some parts would make the other parts depend on them.
    """

    part_kind: PartKind = Field(
        default="reader",
        description="What a part is: an adapter that attends to the public model's keys and values (reader), plain "
        "LoRA with its own (lora), which costs a pass and a cache for each part, or, without training, the start of "
        "its users' text, which the public model reads before each sequence (text).",
    )
    text: int = Field(
        default=1024,
        ge=128,
        multiple_of=128,  # vLLM's cache blocks
        description="The number of tokens of a part's text with --part-kind text.",
    )
    layers: int | None = Field(
        default=None,
        ge=1,
        description="The number of last layers that a part changes, with --part-kind reader. Fewer cost less to train, "
        "to store and to serve.",
        json_schema_extra={"if_none": "half of the public model's"},
    )
    rank: int = Field(default=4, ge=1, le=512, description="LoRA rank.")
    alpha: int = Field(default=32, ge=1, description="LoRA alpha.")
    targets: tuple[str, ...] = Field(
        default_factory=lambda given: READER_TARGETS if given["part_kind"] == "reader" else PLAIN_TARGETS,
        min_length=1,
        description=f"Modules to adapt, separated by commas. Of plain LoRA: {','.join(PLAIN_TARGETS)}.",
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="The initial learning rate, which falls linearly to 0.",
        json_schema_extra={"if_none": f"{_RATE:g}, times sqrt({_STEPS} / steps) with more than {_STEPS} steps"},
    )
    weight_decay: float = Field(default=0.01, ge=0, description="The weight decay of AdamW.")
    epochs: int = Field(default=3, ge=1, description="The number of passes over the text.")
    batch: int = Field(default=1, ge=1, description="The number of blocks in a step.")
    block: int = Field(default=512, ge=2, description="The number of tokens in a block.")
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="The precision of the public model: auto, bfloat16 or float32."
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _separated(cls, targets: object) -> object:
        if isinstance(targets, str):
            return tuple(name.strip() for name in targets.split(",") if name.strip())
        return targets

    def initial_rate(self, steps: int) -> float:
        """Returns the learning rate of a training of so many steps, from which it falls to 0.

        By default it falls with the square root of the steps (tests/benchmarks/README.md, Behind the defaults).
        Below 24 steps this is measured for readers only.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        fewest = _FEWEST_STEPS if self.part_kind == "reader" else _STEPS
        return _RATE * math.sqrt(_STEPS / max(fewest, steps))

    def for_depth(self, depth: int) -> Self:
        """Returns these options with the number of layers that readers of a model of `depth` layers change.

        Raises:
            InputError: the model has fewer layers.
        """
        if self.part_kind != "reader":
            return self.model_copy(update={"layers": None})
        layers = (depth + 1) // 2 if self.layers is None else self.layers
        if layers > depth:
            raise InputError(f"layers: must be at most the {depth} of the public model, not {layers}")
        return self.model_copy(update={"layers": layers})

    @property
    def recipe(self) -> dict[str, Any]:
        """The options that a part's adapter depends on, as JSON."""
        if self.part_kind == "text":
            return self.model_dump(mode="json", include={"part_kind", "text"})
        return self.model_dump(mode="json", exclude={"text"})


DP_SGD_TRAINING = TrainingOptions(
    part_kind="lora", rank=4, alpha=32, targets=("v_proj",), learning_rate=1e-2, weight_decay=0.0, block=512
)
"""The defaults for DP-SGD: few weights, because each gets noise, and the rate that was best at epsilon 2 and level with
the best at 8 (tests/benchmarks/README.md)."""


AUTO_BASE = "auto"
"""In the place of a base's directory: train it first, from the same corpus."""


class DpSgdOptions(Options):
    """Configures the guarantee of DP-SGD for a user and its mechanism.

    A step takes all users, unless `expected_batch` and `population` are given.
    """

    epsilon: float = Field(default=EPSILON, gt=0, description="The epsilon of the training.")
    delta: float = Field(default=DELTA, gt=0, lt=1, description="The delta of the training.")
    clip: float = Field(
        default=1.0, ge=MIN_CLIP, description="The L2 norm to which the gradient of each user is clipped."
    )
    blocks: int = Field(
        default=4, ge=1, description="The first blocks of each user's text to use; the rest is ignored."
    )
    steps: int = Field(default=12, ge=1, description="The number of steps.")
    expected_batch: int | None = Field(
        default=None,
        ge=1,
        description="The average number of users in a step, for corpora too large for full batches. Give --population.",
        json_schema_extra={"if_none": "all users"},
    )
    population: int | None = Field(
        default=None,
        ge=1,
        validate_default=True,
        description="The number of users from which a batch is drawn, as it is publicly known, for --expected-batch.",
        json_schema_extra={"if_none": "none"},
    )

    @field_validator("population")
    @classmethod
    def _with_expected_batch(cls, population: int | None, info: ValidationInfo) -> int | None:
        if (population is None) != (info.data.get("expected_batch") is None):
            raise ValueError("give it with expected_batch, and only then: the sampling rate is their ratio")
        return population

    @property
    def sampling_rate(self) -> float:
        """The probability with which each user is in a step's batch."""
        if self.expected_batch is None or self.population is None:
            return 1.0
        return min(1.0, self.expected_batch / self.population)


class TokenBudget(Options):
    """Holds the budget of all private methods of a table."""

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    tokens: int = Field(gt=0)


class Resources(Options):
    """Configures the resources that one adapter reserves during training, in Ray's units."""

    cpus: float = Field(default=1, gt=0)
    gpus: float | None = Field(default=None, ge=0, description="None: one if the cluster has any")
