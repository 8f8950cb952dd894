"""What a ledger's tokens cost by the accountants of today, whatever was known when they were charged."""

import math
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from services.budget.book import Balance
from services.privacy import accounting
from services.privacy.events import Event

DIGITS = 9
# Of the finest grid worth its time, and of coarser ones: the same tokens, rounded up more and composed faster.
INTERVALS = (1e-5, 1e-4, 1e-3)


class Recomputed(BaseModel):
    """Epsilons at `delta` of all tokens charged, by their events; a claim where these did not depend on answers.

    `epsilon_pld` has one for each grid of the privacy loss distributions. None where an event has no such bound.
    """

    model_config = ConfigDict(frozen=True)

    delta: float
    epsilon_rdp: float | None
    best_order: float
    epsilon_user_rdp: float | None
    epsilon_pld: Mapping[str, float | None]


def recompute(balance: Balance, delta: float) -> Recomputed:
    """Evaluate the events in a ledger again."""
    charged = balance.charged
    best = accounting.epsilon(accounting.rdp(charged), delta)
    user = accounting.user_epsilon(charged, delta)
    return Recomputed(
        delta=delta,
        epsilon_rdp=_shown(best.epsilon),
        best_order=best.order,
        epsilon_user_rdp=_shown(user.epsilon if user else None),
        epsilon_pld={f"{interval:g}": _pld(charged, delta, interval) for interval in INTERVALS},
    )


def _pld(charged: Mapping[Event, int], delta: float, interval: float) -> float | None:
    return _shown(accounting.pld_epsilon(charged, delta, interval))


def _shown(epsilon: float | None) -> float | None:
    return None if epsilon is None or not math.isfinite(epsilon) else accounting.round_up(epsilon, DIGITS)
