"""Defines the options and the resources of a training."""

import math
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from privmix.engine import PartKind
from privmix.foundation.errors import InputError
from privmix.foundation.options import Options
from privmix.foundation.units import DELTA, EPSILON, MIN_CLIP, Unit

Matrices = Literal["b", "both"]
"""The matrices of LoRA that DP-SGD trains (b: FFA-LoRA, Sun et al. 2024)."""

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

    part_kind: PartKind = "reader"
    text: int = Field(
        default=1024,
        ge=128,
        multiple_of=128,
        description="tokens of the text that a part of kind `text` is; a multiple of vLLM's cache blocks",
    )
    layers: int | None = Field(
        default=None,
        ge=1,
        description="the number of last layers that a reader changes; by default half of the model's. Plain "
        "LoRA changes all layers",
    )
    rank: int = Field(default=4, ge=1, le=512)
    alpha: int = Field(default=32, ge=1)
    targets: tuple[str, ...] = Field(
        default_factory=lambda given: READER_TARGETS if given["part_kind"] == "reader" else PLAIN_TARGETS, min_length=1
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        description=f"in the first step; by default {_RATE:g} for {_STEPS} steps, less for more, more for fewer "
        "steps of a reader",
    )
    warm_up: float = Field(
        default=0.0, ge=0, lt=1, description="fraction of the steps in which the learning rate rises from 0"
    )
    weight_decay: float = Field(default=0.01, ge=0)
    epochs: int = Field(default=3, ge=1)
    batch: int = Field(default=1, ge=1, description="blocks in a step")
    block: int = Field(default=512, ge=2, description="tokens in a block")
    precision: Literal["auto", "bfloat16", "float32"] = "auto"

    def initial_rate(self, steps: int) -> float:
        """Returns the learning rate of a training of so many steps, from which it falls to 0.

        By default it falls with the square root of the steps (tests/benchmarks/README.md, Readers).
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
the best at 8 (`tests.benchmarks.dp_sgd`)."""


AUTO_BASE = "auto"
"""In the place of a base's directory: train it first, from the same corpus."""


class DpSgdOptions(Options):
    """Configures the guarantee of DP-SGD and its mechanism.

    A step takes all units, unless `expected_batch` and `population` are given.
    """

    unit: Unit = "user"
    epsilon: float = Field(default=EPSILON, gt=0)
    delta: float = Field(default=DELTA, gt=0, lt=1)
    clip: float = Field(
        default=1.0, ge=MIN_CLIP, description="the L2 norm to which the gradient of each unit is clipped"
    )
    blocks: int = Field(default=4, ge=1, description="the first blocks of each unit's text to use; the rest is ignored")
    steps: int = Field(default=12, ge=1)
    matrices: Matrices = Field(
        default="b", description="b: LoRA's A stays as initialised, so that fewer weights get noise; both: A and B"
    )
    expected_batch: int | None = Field(
        default=None, ge=1, description="the average number of units in a step, for corpora too large for full batches"
    )
    population: int | None = Field(
        default=None,
        ge=1,
        validate_default=True,
        description="the number of units from which a batch is drawn, as it is publicly known",
    )

    @field_validator("population")
    @classmethod
    def _with_expected_batch(cls, population: int | None, info: ValidationInfo) -> int | None:
        if (population is None) != (info.data.get("expected_batch") is None):
            raise ValueError("give it with expected_batch, and only then: the sampling rate is their ratio")
        return population

    @property
    def sampling_rate(self) -> float:
        """The probability with which each unit is in a step's batch."""
        if self.expected_batch is None or self.population is None:
            return 1.0
        return min(1.0, self.expected_batch / self.population)


class TokenBudget(Options):
    """Holds the budget of all private methods of a table."""

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    tokens: int = Field(gt=0)

    def limits(self) -> dict[str, Any]:
        return self.model_dump()


class Resources(Options):
    """Configures the resources that one adapter reserves during training, in Ray's units."""

    cpus: float = Field(default=1, gt=0)
    gpus: float | None = Field(default=None, ge=0, description="None: one if the cluster has any")
