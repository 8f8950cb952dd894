"""Recomputes epsilons from the events of a ledger, which are tighter than what a filter compares."""

import math
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from privmix.budget.filter import Filter
from privmix.budget.state import Balance
from privmix.budget.statement import rounded_up
from privmix.privacy import accounting
from privmix.privacy.events import Event

RECOMPUTED_DIGITS = 9
# Grid intervals for privacy loss distributions, from the finest that is fast enough to coarser, faster ones.
INTERVALS = (1e-5, 1e-4, 1e-3)


class Recomputed(BaseModel):
    """Holds epsilons at `delta` of all charged tokens. They hold only if the events did not depend on answers.

    `epsilon_pld` has one epsilon for each grid interval; None if an event has no privacy loss distribution.
    """

    model_config = ConfigDict(frozen=True)

    delta: float
    epsilon_rdp: float | None
    best_order: float
    epsilon_pld: Mapping[str, float | None]


def recompute(balance: Balance, delta: float) -> Recomputed:
    """Computes tighter epsilons from the events in a ledger and its private base."""
    paid = Filter(balance.terms).paid(balance.charged)
    best = accounting.epsilon(accounting.rdp(paid), delta)
    return Recomputed(
        delta=delta,
        epsilon_rdp=rounded_up(best.epsilon, RECOMPUTED_DIGITS),
        best_order=best.order,
        epsilon_pld={f"{interval:g}": _on_grid(paid, delta, interval) for interval in INTERVALS},
    )


def _on_grid(paid: Mapping[Event, int], delta: float, interval: float) -> float | None:
    epsilon = accounting.pld_epsilon(paid, delta, interval)
    return rounded_up(math.inf if epsilon is None else epsilon, RECOMPUTED_DIGITS)
