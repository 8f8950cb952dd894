"""Defines the options of the laboratory's evaluations and their defaults, without importing what computes them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, field_validator, model_validator

from privmix.foundation.options import Options
from privmix.training.options import TokenBudget

if TYPE_CHECKING:
    from privmix.privacy.settings import Settings

Precision = Literal["auto", "bfloat16", "float32"]


class EvaluationOptions(Options):
    """Configures an evaluation.

    Attributes:
        epsilon, delta, tokens: the budget of every private method.
        protocols: the protocols to evaluate besides the references and DP-SGD; None means all.
        fields: values of the protocols' fields, by name, as text. A protocol without such a field stays as it is.
        sweep: the field of the budget or of a protocol that takes each of `values` in turn, with a table for each.
            Protocols without it are left out. None means one table.
        run_tokens: the number of positions in a run; None means the fewest tokens of a budget.
        drawn: the number of parts to score at each position, drawn at random; None means all. With many parts, it makes
            an evaluation cheap. A protocol that needs more parts for a token is not evaluated. The reference without
            privacy and PMixed's distribution over its draws are means over these parts.
    """

    epsilon: float = Field(8.0, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    tokens: int = Field(1024, ge=1)
    protocols: tuple[str, ...] | None = Field(None, min_length=1)
    fields: Mapping[str, str] = Field(default_factory=dict)
    sweep: str | None = None
    values: tuple[str, ...] = ()
    run_tokens: int | None = Field(None, ge=1)
    drawn: int | None = Field(None, ge=1)
    runs: int = Field(5, ge=1)
    context: int = Field(256, ge=2)
    seed: int = Field(0, ge=0)
    precision: Precision = "auto"

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
        """Returns whether to evaluate these settings. References are always evaluated."""
        return self.protocols is None or settings.protocol in ("ensemble", *self.protocols)

    def scores_few(self, parts: int) -> bool:
        """Returns whether only some of an ensemble's ``parts`` parts are scored at a position."""
        return self.drawn is not None and self.drawn < parts
