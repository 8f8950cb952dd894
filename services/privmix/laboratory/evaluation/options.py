"""Defines the options of the laboratory's evaluations and their defaults, without importing what computes them."""

from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field, field_validator

from privmix.foundation.options import Options
from privmix.training.options import TokenBudget

if TYPE_CHECKING:
    from privmix.privacy.settings import Settings

Quantity = Literal["epsilon", "tokens", "q", "order", "radius"]
"""What a sweep varies."""
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
SWEEP_RUNS = 2
"""The number of runs in sweeps; tables use all runs. The points of a line share the same text."""

Precision = Literal["auto", "bfloat16", "float32"]


class EvaluationOptions(Options):
    """Configures an evaluation.

    Attributes:
        epsilons, tokens: the budgets, with a table for each pair. Sweeps use the largest epsilon and the fewest tokens.
        protocols: the protocols to evaluate besides the references and DP-SGD; None means all.
        run_tokens: the number of positions in a run; None means the fewest tokens of a budget.
        drawn: the number of parts to score at each position, drawn at random; None means all. With many parts, it makes
            an evaluation cheap. A protocol that needs more parts for a token is not evaluated. The reference without
            privacy and PMixed's distribution over its draws are means over these parts.
        sweeps: the ablation figures to compute.
    """

    epsilons: tuple[Annotated[float, Field(gt=0)], ...] = Field((2.0, 8.0), min_length=1)
    delta: float = Field(1e-5, gt=0, lt=1)
    tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field((1024,), min_length=1)
    protocols: tuple[str, ...] | None = Field(None, min_length=1)
    run_tokens: int | None = Field(None, ge=1)
    drawn: int | None = Field(None, ge=1)
    runs: int = Field(5, ge=1)
    context: int = Field(256, ge=2)
    sweeps: tuple[Quantity, ...] = QUANTITIES
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

    @property
    def budgets(self) -> tuple[TokenBudget, ...]:
        return tuple(
            TokenBudget(epsilon=epsilon, delta=self.delta, tokens=tokens)
            for tokens in sorted(self.tokens)
            for epsilon in sorted(self.epsilons)
        )

    def include(self, settings: "Settings") -> bool:
        """Returns whether to evaluate these settings. References are always evaluated."""
        return self.protocols is None or settings.protocol in ("ensemble", *self.protocols)

    def scores_few(self, parts: int) -> bool:
        """Returns whether only some of an ensemble's ``parts`` parts are scored at a position."""
        return self.drawn is not None and self.drawn < parts

    @property
    def sweep_budget(self) -> TokenBudget:
        return TokenBudget(epsilon=max(self.epsilons), delta=self.delta, tokens=min(self.tokens))
