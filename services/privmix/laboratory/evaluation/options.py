"""Defines the options of comparisons and their defaults, without importing what computes them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from privmix.foundation.errors import InputError
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
    renyi_epsilon: float | None = Field(
        None,
        gt=0,
        description="The budget as a Rényi epsilon at the order of --set order=, in the place of --epsilon.",
        json_schema_extra={"if_none": "none"},
    )
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
        budget = {*TokenBudget.model_fields, "renyi_epsilon"}
        return {name: own for name, own in self._all(value).items() if name not in budget}

    def budget(self, value: str | None) -> TokenBudget:
        """Returns the budget at one value of the sweep. Raises `InputError` if it is invalid."""
        given = self._all(value)
        limits = {name: given.get(name, getattr(self, name)) for name in TokenBudget.model_fields}
        if (loss := given.get("renyi_epsilon", self.renyi_epsilon)) is not None:
            if "order" not in given:
                raise InputError("renyi-epsilon: has an order; name it too, such as --set order=2")
            limits["epsilon"] = _converted(given["order"], loss, float(limits["delta"]))
        return TokenBudget.checked(**limits)

    def _all(self, value: str | None) -> Mapping[str, str]:
        return {**self.fields} | ({} if self.sweep is None or value is None else {self.sweep: value})

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


def _converted(order: str, loss: str | float, delta: float) -> float:
    from privmix.privacy import accounting  # slow to import

    try:
        return accounting.epsilon(np.array([float(loss)]), delta, [float(order)]).epsilon
    except ValueError as error:
        raise InputError(f"renyi-epsilon: {loss} at order {order} is no loss: {error}") from error
