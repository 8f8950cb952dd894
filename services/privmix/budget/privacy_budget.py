"""Defines the privacy budget that a ledger keeps."""

import math
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from privmix.budget.token_counter import TokenCounter
from privmix.foundation.errors import LedgerMismatch
from privmix.privacy import accounting
from privmix.privacy.events import Accountant, Event, from_json
from privmix.privacy.protocol import Protocol
from privmix.privacy.settings import Enforced, Settings

# dp_accounting converts Rényi divergences to an epsilon above this order only.
LOWEST_ORDER = 1.01

ANY_ORDER = 2.0
"""The order of a ledger without a finite budget or without costs, where the order does not matter."""

_PARTITION = (
    ". This ledger charges each part for itself, and under another partition a user who has spent one part's account "
    "would have another's: train the ensemble with the ledger's salt and number of parts"
)


class PrivacyBudget(BaseModel):
    """Limits one ensemble to (epsilon, delta) under an adjacency, enforced at one Rényi order.

    Attributes:
        ensemble: the manifest's id.
        epsilon: None means no limit.
        order: the Rényi order, fixed when the ledger is created, because later events may be chosen after looking at
            earlier answers (Feldman & Zrnic 2021).
        adjacency: which pairs of corpora the guarantee covers.
        enforced: what the budget limits: the data-independent bound of the releases ("bound"), or the losses that the
            protocol measures on the private text ("measured").
        stop_within: the ledger stops after a number of measured tokens that it draws uniformly from 0 to this number
            less 1 when it is created (random stopping, SubMix, Proposition C.3).
        base: the event of the private base, as JSON, which the ledger charges once, from its creation on; None where
            the base is a public model.
        counter: the number of tokens of one event that exact composition allows, fixed when the ledger is created; it
            then replaces the filter at `order`. None where the filter allows as many (`filter.counted`).
        horizon: the number of tokens over which the parts' accounts should last; None without accounts.
        imported: whether the ensemble's adapters were trained elsewhere (`privmix import`).
        partition: identifies the assignment of users to parts, of a ledger that charges the parts separately; None for
            one that charges all parts alike. Under another assignment, a user who spent one part's account would get
            another's.
        parts: the number of parts of the partition, whether they are served or not. Each of them has an account,
            though a ledger has no entry of a part that was never served. None without accounts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ensemble: str = Field(min_length=1)
    epsilon: float | None = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    order: float = Field(gt=LOWEST_ORDER)
    adjacency: str = Field(min_length=1)
    enforced: Enforced = "bound"
    stop_within: int | None = Field(None, gt=0)
    horizon: int | None = Field(None, gt=0)
    imported: bool = False
    partition: str | None = None
    parts: int | None = Field(None, ge=1)
    base: str | None = None
    counter: TokenCounter | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.base is not None and from_json(self.base).adjacency != self.adjacency:
            raise ValueError("base: its guarantee is for other neighbouring corpora than the tokens'")
        if self.counter is not None and (self.epsilon is None or self.enforced != "bound" or self.horizon is not None):
            raise ValueError("counter: it limits tokens of a fixed cost, in a budget with an epsilon and no accounts")
        if self.horizon is not None and self.parts is None:
            raise ValueError("parts: a ledger with accounts has one for each part")
        return self

    @property
    def accountant(self) -> Accountant:
        """How a ledger with this budget composes tokens."""
        if self.counter is None or self.counter.planned is None:
            return Accountant(self.order)
        return Accountant(self.order, self.counter.planned, self.counter.unit)

    @property
    def base_event(self) -> Event | None:
        return None if self.base is None else from_json(self.base)

    @classmethod
    def of(
        cls,
        ensemble: str,
        settings: Settings,
        protocol: Protocol,
        kept: Accountant | None = None,
        base: Event | None = None,
        imported: bool = False,
        partition: str | None = None,
        parts: int | None = None,
        counter: TokenCounter | None = None,
    ) -> Self:
        """Returns the budget of an ensemble that serves with `protocol`, planned from `settings`.

        Args:
            ensemble: the manifest's id.
            partition: the manifest's; ignored where all parts are charged alike.
            parts: the number of parts of the partition, served or not; None if they are those of `protocol`.
            kept: of the existing ledger; None chooses the Rényi order at which the budget lasts longest.
            base, imported, counter: see the attributes.
        """
        return cls(
            ensemble=ensemble,
            epsilon=settings.epsilon,
            delta=settings.delta,
            order=kept.order if kept is not None else protocol.order or _best_order(protocol.event, settings),
            adjacency=protocol.guarantee.adjacency,
            enforced=settings.enforced,
            stop_within=settings.stop_within,
            base=None if base is None else base.to_json(),
            counter=counter,
            imported=imported,
            horizon=settings.horizon,
            partition=partition if settings.horizon is not None or settings.enforced == "measured" else None,
            parts=None if settings.horizon is None else parts or protocol.parts,
        )

    def check_same(self, configured: "PrivacyBudget") -> None:
        """Checks that the configured budget equals the budget of this ledger.

        Raises:
            LedgerMismatch: the budgets differ. The message names the fields.
        """
        differences = [
            f"{name} is {kept!r} there and {wanted!r} here"
            for name in type(self).model_fields
            if (kept := getattr(self, name)) != (wanted := getattr(configured, name))
        ]
        if differences:
            raise LedgerMismatch(
                f"it keeps another budget than the configuration: {', '.join(differences)}. Tokens were released under "
                "the budget in the ledger, so configure that one. A new ensemble, or another budget for this one, "
                "needs a separate ledger; the epsilons of two ledgers for the same text add up"
                + (_PARTITION if self.partition != configured.partition else "")
            )


def _best_order(event: Event, settings: Settings) -> float:
    divergences = accounting.rdp({event: settings.tokens, **settings.spent_before})
    if not divergences.any() or not math.isfinite(divergences.min()):
        return ANY_ORDER
    return accounting.epsilon(divergences, settings.delta).order
