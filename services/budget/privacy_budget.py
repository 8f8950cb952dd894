"""The promise that a ledger keeps."""

import math
from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from services.budget.errors import LedgerMismatch
from services.privacy import accounting
from services.privacy.events import Event
from services.privacy.protocol import Protocol
from services.privacy.settings import Enforced, Settings

# dp_accounting converts Rényi divergences to an epsilon above this order only.
LOWEST_ORDER = 1.01

ANY_ORDER = 2.0
"""The order of a ledger in which no order matters: nothing is promised, or nothing costs."""

# What ledgers of earlier versions say, and what their events are now read as. A part present or absent is no promise to
# a user: the same events have another cost, and an epsilon above the budget exhausts the ledger.
_READ_AS: Mapping[str, tuple[str, ...]] = {
    "part, add or remove": ("user", "part, as published"),
    "user, add or remove": ("user",),
    "record, add or remove": ("record",),
}


class PrivacyBudget(BaseModel):
    """What one ensemble is promised: (epsilon, delta) under an adjacency, enforced at one Rényi order.

    `ensemble` is the manifest's id; `epsilon` is None where nothing is promised. `order` is fixed when the ledger is
    created, because later events may be chosen after looking at earlier answers (Feldman & Zrnic 2021). `enforced`
    says what the budget limits: the data-independent bound of what is released, or, for protocols that measure their
    losses on the private text, those. With `stop_within` the ledger stops, at the latest, after a number of measured
    tokens that it drew uniformly from 1 to this when it was made (random stopping, SubMix, Proposition C.3).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ensemble: str = Field(min_length=1)
    epsilon: float | None = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    order: float = Field(gt=LOWEST_ORDER)
    adjacency: str = Field(min_length=1)
    enforced: Enforced = "bound"
    stop_within: int | None = Field(None, gt=0)

    @classmethod
    def of(cls, ensemble: str, settings: Settings, protocol: Protocol, order: float | None = None) -> Self:
        """Returns the promise that `protocol`, planned from `settings`, keeps for an ensemble.

        Args:
            ensemble: the manifest's id.
            order: of the ledger, where there is one already; None: the order at which the budget lasts longest.
        """
        return cls(
            ensemble=ensemble,
            epsilon=settings.epsilon,
            delta=settings.delta,
            order=order or protocol.order or _best_order(protocol.event, settings),
            adjacency=protocol.guarantee.adjacency,
            enforced=settings.enforced,
            stop_within=settings.stop_within,
        )

    @property
    def adjacencies(self) -> tuple[str, ...]:
        """What the ledger's numbers may be about, the usual one first: several where an earlier version made it."""
        return _READ_AS.get(self.adjacency, (self.adjacency,))

    def demand(self, configured: "PrivacyBudget") -> None:
        """Checks that a configuration makes the promise that a ledger keeps.

        Raises:
            LedgerMismatch: it makes another one; names the fields.
        """
        differences = [
            f"{name} is {ours!r} there and {asked!r} here"
            for name in type(self).model_fields
            if (ours := getattr(self, name)) != (asked := getattr(configured, name))
            and not (name == "adjacency" and asked in self.adjacencies)
        ]
        if differences:
            raise LedgerMismatch(
                f"it keeps another promise than the configuration makes: {', '.join(differences)}. Tokens were "
                "released under that in the ledger, so it stands: configure it as it is there. A new ensemble, or a "
                "further promise for this one, needs a ledger of its own; what two ledgers promise for the same text "
                "adds up"
            )


def _best_order(event: Event, settings: Settings) -> float:
    divergences = accounting.rdp({event: settings.tokens})
    if not divergences.any() or not math.isfinite(divergences.min()):
        return ANY_ORDER
    return accounting.epsilon(divergences, settings.delta).order
