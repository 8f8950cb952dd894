"""How an adapter is trained, and on what."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.errors import InputError
from services.privacy.protocols.dp_sgd import Unit


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """These settings, or an `InputError` that names the first impossible one."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}") from error


Attention = Literal["public", "own"]
"""Whose keys and values an adapter attends to: the public model's (a reader), or its own (plain LoRA)."""

READER_TARGETS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Everything that a reader has of its own."""
PLAIN_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class TrainingOptions(_Settings):
    """LoRA and its optimiser. `services/evaluation/README.md` has the table of tests that the defaults follow from.

    Every field is chosen before the corpus is read: a value tuned on some parts would make the others depend on them.
    """

    attention: Attention = "public"
    rank: int = Field(default=4, ge=1, le=512)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: tuple[str, ...] = Field(
        default_factory=lambda given: READER_TARGETS if given["attention"] == "public" else PLAIN_TARGETS, min_length=1
    )
    learning_rate: float = Field(default=1e-3, gt=0)
    warm_up: float = Field(default=0.0, ge=0, lt=1, description="share of the steps in which the rate rises from 0")
    weight_decay: float = Field(default=0.01, ge=0)
    epochs: int = Field(default=3, ge=1)
    batch: int = Field(default=1, ge=1, description="blocks a step")
    block: int = Field(default=512, ge=2, description="tokens a block")
    precision: Literal["auto", "bfloat16", "float32"] = "auto"


DP_SGD_TRAINING = TrainingOptions(
    attention="own", rank=4, alpha=32, targets=("q_proj", "v_proj"), learning_rate=2e-4, epochs=3, batch=8, block=512
)
"""For DP-SGD: few weights, since each of them gets noise."""


class DpSgdOptions(_Settings):
    """What DP-SGD is to promise, and how it keeps that."""

    unit: Unit = "record"
    epsilon: float = Field(default=8.0, gt=0)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    clip: float = Field(default=1.0, gt=0, description="the length that the gradient of each unit is clipped to")
    blocks: int = Field(default=1, ge=1, description="of each unit's text, from its beginning; the rest is left out")
    expected_batch: int = Field(default=64, ge=1, description="units a step, on average")
    population: int | None = Field(
        default=None, ge=1, description="how many units to plan for; None: as many as there are, which then is public"
    )


class Resources(_Settings):
    """What one adapter holds while it trains, in Ray's units."""

    cpus: float = Field(default=1, gt=0)
    gpus: float | None = Field(default=None, ge=0, description="None: one where the cluster has any")
