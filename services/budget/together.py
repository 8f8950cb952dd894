"""What is promised to a person whose text is in several ensembles."""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal

from pydantic import BaseModel, ConfigDict

from services.budget.statement import Statement

RETIRED = "What a retired ensemble released counts too."


class Together(BaseModel):
    """The sum of the promises of several ensembles; None where there is none.

    Every promise holds whatever a client asked the other ensembles before, so epsilons and deltas add up, also where
    requests for them take turns (Vadhan & Zhang 2023, Concurrent Composition Theorems for Differential Privacy).
    """

    model_config = ConfigDict(frozen=True)

    models: tuple[str, ...]
    epsilon: float | None
    delta: float | None
    guarantee: str


def together(statements: Mapping[str, Statement]) -> Together:
    """Add up the promises of ensembles, by model name."""
    models, stated = tuple(statements), statements.values()
    named = " and ".join([", ".join(models[:-1]), models[-1]]) if len(models) > 1 else "".join(models)
    if len({each.adjacency for each in stated}) > 1:
        why = "they are for different neighbouring corpora"
    elif any(each.epsilon is None for each in stated):
        why = "one of them promises no epsilon"
    else:
        epsilon = _sum(each.epsilon for each in stated if each.epsilon is not None)
        delta = _sum(each.delta for each in stated)
        return Together(
            models=models,
            epsilon=epsilon,
            delta=delta,
            guarantee=f"The promises to a person whose text is in {named} add up: epsilon {epsilon:g} and delta "
            f"{delta:g} for all that they ever release. {RETIRED}",
        )
    return Together(
        models=models,
        epsilon=None,
        delta=None,
        guarantee=f"The promises of {named} have no sum, because {why}: a person whose text is in several of them has "
        f"no promise for all that they release. {RETIRED}",
    )


def _sum(numbers: Iterable[float]) -> float:
    """Exact in decimals, so that 0.1 and 0.2 are 0.3; rounded up where that is no float."""
    exact = sum((Decimal(repr(number)) for number in numbers), Decimal(0))
    rounded = float(exact)
    return rounded if Decimal(repr(rounded)) >= exact else math.nextafter(rounded, math.inf)
