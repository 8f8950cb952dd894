"""Defines the options of comparisons and their defaults, without importing what computes them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, field_validator, model_validator

from privmix.foundation.options import Options
from privmix.training.options import TokenBudget

if TYPE_CHECKING:
    from privmix.privacy.settings import Settings

Precision = Literal["auto", "bfloat16", "float32"]


class ComparisonOptions(Options):
    """Chooses the protocols to compare, at the same budget.

    Attributes:
        protocols: the protocols, besides the references and DP-SGD; None means all.
        fields: values of the protocols' fields, by name, as text. A protocol without such a field stays as it is.
        sweep: the field of the budget or of a protocol that takes each of `values` in turn, with a table for each.
            Protocols without it are left out. None means one table.
    """

    epsilon: float = Field(8.0, gt=0, description="The epsilon of the budget.")
    delta: float = Field(1e-5, gt=0, lt=1, description="The delta of all budgets.")
    tokens: int = Field(1024, ge=1, description="The number of tokens that the budget must last for.")
    protocols: tuple[str, ...] | None = Field(None, min_length=1)
    fields: Mapping[str, str] = Field(default_factory=dict)
    sweep: str | None = None
    values: tuple[str, ...] = ()

    @field_validator("protocols")
    @classmethod
    def _known(cls, protocols: tuple[str, ...] | None) -> tuple[str, ...] | None:
        from privmix.privacy.protocols import PROTOCOLS  # slow to import

        unknown = set(protocols or ()) - set(PROTOCOLS)
        if unknown:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PROTOCOLS)}")
        return protocols

    @model_validator(mode="after")
    def _swept(self) -> Self:
        if (self.sweep is None) != (not self.values):
            raise ValueError("sweep: give a field and its values, such as q=0.1,0.5")
        return self

    @property
    def points(self) -> tuple[str | None, ...]:
        """The values of the sweep, without repetitions; only None without a sweep."""
        return tuple(dict.fromkeys(self.values)) or (None,)

    def given(self, value: str | None) -> Mapping[str, str]:
        """Returns what is set of the protocols' fields at one value of the sweep."""
        swept = {} if self.sweep is None or value is None else {self.sweep: value}
        return {name: own for name, own in ({**self.fields} | swept).items() if name not in TokenBudget.model_fields}

    def budget(self, value: str | None) -> TokenBudget:
        """Returns the budget at one value of the sweep. Raises `InputError` if it is invalid."""
        limits: dict[str, object] = {"epsilon": self.epsilon, "delta": self.delta, "tokens": self.tokens}
        limits |= {name: own for name, own in self.fields.items() if name in limits}
        if self.sweep in limits:
            limits[self.sweep] = value
        return TokenBudget.checked(**limits)

    def include(self, settings: "Settings") -> bool:
        """Returns whether to compare these settings. References always are."""
        return self.protocols is None or settings.protocol in ("ensemble", *self.protocols)


class EvaluationOptions(ComparisonOptions):
    """Configures an evaluation."""

    run_tokens: int | None = Field(
        None,
        ge=1,
        description="The number of tokens in a run.",
        json_schema_extra={"if_none": "those of the smallest budget"},
    )
    runs: int = Field(5, ge=1, description="The number of runs. They use different text if there is enough of it.")
    context: int = Field(256, ge=2, description="The maximum number of tokens in a block of text.")
    precision: Precision = Field("auto", description="The precision of the models: auto, bfloat16 or float32.")
