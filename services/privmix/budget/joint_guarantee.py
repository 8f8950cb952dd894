"""Adds up the promises to a person whose text is in several ensembles."""

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from pydantic import BaseModel, ConfigDict

from privmix.budget.statement import Statement
from privmix.privacy.accounting import stated

RETIRED = "The releases of a retired ensemble count too."


class JointGuarantee(BaseModel):
    """Holds the sum of the promises of several ensembles. The numbers are None if there is no sum.

    Each promise holds for all earlier requests to the other ensembles. So epsilons and deltas add up, even if clients
    alternate between ensembles (Vadhan & Zhang 2023, Concurrent Composition Theorems for Differential Privacy).
    """

    model_config = ConfigDict(frozen=True)

    models: tuple[str, ...]
    epsilon: float | None
    delta: float | None
    guarantee: str


def joint_guarantee(
    statements: Mapping[str, Statement], cohorts: Mapping[str, str | None] | None = None
) -> JointGuarantee:
    """Returns the sum of the promises of ensembles.

    Args:
        statements: by model name.
        cohorts: the cohort of each ensemble, by model name. A person is in one ensemble of a cohort at most
            (`privmix.training.cohorts`), so a cohort counts once, with its largest epsilon and its largest
            delta.
    """
    groups: dict[str, dict[str, Statement]] = {}
    for name, promise in statements.items():
        groups.setdefault((cohorts or {}).get(name) or name, {})[name] = promise
    models = tuple(statements)
    named = _listed([f"one of {_listed(list(own))}" if len(own) > 1 else next(iter(own)) for own in groups.values()])
    if len({promise.adjacency for promise in statements.values()}) > 1:
        why = "they are for different neighbouring corpora"
    elif any(promise.epsilon is None for promise in statements.values()):
        why = "one of them promises no epsilon"
    else:
        epsilon = _sum(max(promise.epsilon or 0.0 for promise in own.values()) for own in groups.values())
        delta = _sum(max(promise.delta for promise in own.values()) for own in groups.values())
        adds = "add up: " if len(groups) > 1 else "do not add up, because nobody is in two of them: "
        return JointGuarantee(
            models=models,
            epsilon=epsilon,
            delta=delta,
            guarantee=f"The promises to a person whose text is in {named} {adds}epsilon {stated(epsilon)} and delta "
            f"{stated(delta)} for all that they ever release. {RETIRED}",
        )
    return JointGuarantee(
        models=models,
        epsilon=None,
        delta=None,
        guarantee=f"The promises of {named} have no sum, because {why}: a person whose text is in several of them has "
        f"no promise for all that they release. {RETIRED}",
    )


def _listed(names: Sequence[str]) -> str:
    """Returns "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _sum(numbers: Iterable[float]) -> float:
    """Adds decimals, so that 0.1 and 0.2 are 0.3. Rounds up if the sum is not a float."""
    exact = sum((Decimal(repr(number)) for number in numbers), Decimal(0))
    rounded = float(exact)
    return rounded if Decimal(repr(rounded)) >= exact else math.nextafter(rounded, math.inf)
