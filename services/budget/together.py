"""Adds up the promises to a person whose text is in several ensembles."""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal

from pydantic import BaseModel, ConfigDict

from services.budget.statement import Statement
from services.privacy.accounting import stated

RETIRED = "The releases of a retired ensemble count too."


class Together(BaseModel):
    """Holds the sum of the promises of several ensembles. The numbers are None if there is no sum.

    Each promise holds for all earlier requests to the other ensembles. So epsilons and deltas add up, even if clients
    alternate between ensembles (Vadhan & Zhang 2023, Concurrent Composition Theorems for Differential Privacy).
    """

    model_config = ConfigDict(frozen=True)

    models: tuple[str, ...]
    epsilon: float | None
    delta: float | None
    guarantee: str


def together(statements: Mapping[str, Statement]) -> Together:
    """Returns the sum of the promises of ensembles, given by model name."""
    models, promises = tuple(statements), statements.values()
    named = " and ".join([", ".join(models[:-1]), models[-1]]) if len(models) > 1 else "".join(models)
    if len({promise.adjacency for promise in promises}) > 1:
        why = "they are for different neighbouring corpora"
    elif any(promise.epsilon is None for promise in promises):
        why = "one of them promises no epsilon"
    else:
        epsilon = _sum(promise.epsilon for promise in promises if promise.epsilon is not None)
        delta = _sum(promise.delta for promise in promises)
        return Together(
            models=models,
            epsilon=epsilon,
            delta=delta,
            guarantee=f"The promises to a person whose text is in {named} add up: epsilon {stated(epsilon)} and delta "
            f"{stated(delta)} for all that they ever release. {RETIRED}",
        )
    return Together(
        models=models,
        epsilon=None,
        delta=None,
        guarantee=f"The promises of {named} have no sum, because {why}: a person whose text is in several of them has "
        f"no promise for all that they release. {RETIRED}",
    )


def _sum(numbers: Iterable[float]) -> float:
    """Adds decimals, so that 0.1 and 0.2 are 0.3. Rounds up if the sum is not a float."""
    exact = sum((Decimal(repr(number)) for number in numbers), Decimal(0))
    rounded = float(exact)
    return rounded if Decimal(repr(rounded)) >= exact else math.nextafter(rounded, math.inf)
