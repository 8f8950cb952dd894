"""What is promised, what is spent and what is left, for people and for programs."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict

from services.budget.filter import UNLIMITED, Filter
from services.budget.privacy_budget import PrivacyBudget
from services.budget.state import Balance
from services.privacy import accounting
from services.privacy.events import Event, Guarantee, Status
from services.privacy.settings import Enforced

DIGITS = 4

NOTE = (
    "The guarantee is epsilon and delta, for everything that is ever released. epsilon_spent, epsilon_left and "
    "tokens_left are accounts of the charges so far: estimates, and no guarantee at a moment that is chosen after "
    "looking at answers."
)

_STATUSES: tuple[str, ...] = get_args(Status)


class Charge(BaseModel):
    """Tokens charged at the cost of one event, those of open leases included."""

    model_config = ConfigDict(frozen=True)

    event: dict[str, Any]
    status: str
    tokens: int


class Statement(BaseModel):
    """What a client may know: nothing here depends on the private text.

    The promise is `epsilon` and `delta`, for everything that is ever released. A Rényi filter at `order` keeps it,
    whatever depends on earlier answers (Feldman & Zrnic 2021). `epsilon_spent` is what the filter compares with the
    promise: that of all tokens charged, by the data-independent bounds of their events; or, while all come from one
    private release that is paid for once, by its privacy loss distribution. A filter guarantees nothing for a moment
    that is chosen after looking at answers, so it is an estimate, as `note` says. Epsilons are rounded up to `DIGITS`
    decimals, what is left of one is rounded down. `tokens_left` counts tokens of `event`, the current one; `exhausted`
    says that there is none. A number is None where it is not known, has no limit, or may not be told.
    """

    model_config = ConfigDict(frozen=True)

    epsilon: float | None
    delta: float
    order: float
    adjacency: str
    enforced: Enforced
    stop_within: int | None
    guarantee: str
    epsilon_spent: float | None
    epsilon_left: float | None
    note: str = NOTE
    tokens_charged: int
    tokens_left: int | None
    exhausted: bool
    stopped: bool
    event: dict[str, Any] | None


class LedgerStatement(Statement):
    """What there is to know besides, that does not depend on the private text either.

    `epsilon_bound` is that of these tokens' data-independent bounds at the promise's order, which the filter compares
    with the promise where `enforced` is "bound". `tokens_held` were granted in leases that are not settled: they are
    charged, and may never be released. `rows` and `head` identify the chain: a copy kept elsewhere proves
    later that no row was taken off its end.
    """

    ensemble: str
    epsilon_bound: float | None
    tokens_held: int
    charges: tuple[Charge, ...]
    epoch: int
    rows: int
    head: str


class OperatorStatement(LedgerStatement):
    """What the operator alone may know: epsilons of losses that were measured on the private text, eps(D).

    `epsilon_measured` is that of all tokens, at the promise's order, for the part that lost most; None where nothing
    was measured. `epsilon_measured_left` is what the promise leaves of it, where measured losses are what it limits.
    """

    epsilon_measured: float | None
    epsilon_measured_left: float | None

    def ledger(self) -> LedgerStatement:
        """What does not depend on the private text."""
        return LedgerStatement(**{name: getattr(self, name) for name in LedgerStatement.model_fields})

    def client(self) -> Statement:
        """The part of it that may be told to anyone."""
        return Statement(**{name: getattr(self, name) for name in Statement.model_fields})


def statement(balance: Balance, event: Event | None = None) -> OperatorStatement:
    """Where a ledger stands, with what is left counted in tokens of `event` (by default the one charged last)."""
    terms, charged = balance.terms, balance.charged
    event = event or balance.latest
    bound = Filter(terms.model_copy(update={"enforced": "bound"})).epsilon(charged)
    tokens, left = sum(charged.values()), _tokens_left(balance, event)
    measured = _measured(balance)
    limits_bound = terms.enforced == "bound"
    return OperatorStatement(
        **(terms.model_dump() | {"adjacency": _adjacency(terms, charged)}),
        guarantee=_guarantee(terms, [*charged, *filter(None, [event])], None if left is None else tokens + left, bound),
        epsilon_spent=_up(bound),
        epsilon_left=_rest(terms.epsilon, bound) if limits_bound else None,
        epsilon_bound=_up(bound),
        exhausted=left == 0,
        epsilon_measured=_up(measured),
        epsilon_measured_left=None if limits_bound or measured is None else _rest(terms.epsilon, measured),
        tokens_charged=tokens,
        tokens_held=sum(balance.held.values()),
        tokens_left=left,
        stopped=balance.stopped,
        event=None if event is None else json.loads(event.to_json()),
        charges=tuple(
            Charge(event=json.loads(each.to_json()), status=each.guarantee.status, tokens=count)
            for each, count in charged.items()
        ),
        epoch=balance.epoch,
        rows=balance.rows,
        head=balance.head,
    )


def promise_sentence(terms: PrivacyBudget, guarantee: Guarantee, tokens: int | None) -> str:
    """What the terms promise, in one sentence; `tokens` of them at most, where their number is fixed in advance."""
    if terms.enforced == "measured" and guarantee.status == "certified":  # of the bound, which is not what is limited
        guarantee = replace(guarantee, status="data-dependent", adjacency="part, as published")
    epsilon = "unbounded" if terms.epsilon is None else f"{terms.epsilon:g}"
    return guarantee.sentence(epsilon, terms.delta, tokens)


def _adjacency(terms: PrivacyBudget, charged: Iterable[Event]) -> str:
    """Which two corpora the numbers are about; the events say it where an earlier version made the ledger."""
    own = {event.adjacency for event in charged}
    return next((each for each in reversed(terms.adjacencies) if each in own), terms.adjacencies[0])


def _measured(balance: Balance) -> float | None:
    if not any(event.measured for event in balance.charged):
        return None
    terms = balance.terms.model_copy(update={"enforced": "measured"})
    return Filter(terms).epsilon(balance.charged, balance.losses)


def _guarantee(terms: PrivacyBudget, events: Iterable[Event], tokens: int | None, bound: float) -> str:
    """The weakest event's, because what is charged is charged for all of them together.

    Tokens that cost more than the budget, as those of an earlier version's ledger may, have what they cost.
    """
    guarantees = [event.guarantee for event in events]
    if not guarantees:
        return "Nothing that depends on the private text was released."
    weakest = max(guarantees, key=lambda guarantee: _STATUSES.index(guarantee.status))
    if terms.enforced != "bound" or terms.epsilon is None or bound <= terms.epsilon:
        return promise_sentence(terms, weakest, tokens)
    spent = terms.model_copy(update={"epsilon": accounting.round_up(bound, DIGITS)})
    reason = "an earlier version counted them for a part present or absent, which protects no user"
    return (
        f"{promise_sentence(spent, weakest, tokens)} The tokens cost more than the budget of {terms.epsilon:g}, "
        f"which is exhausted{f': {reason}' if terms.adjacency not in terms.adjacencies else ''}."
    )


def _tokens_left(balance: Balance, event: Event | None) -> int | None:
    """None where it has no limit, or depends on losses that are not known yet or are private."""
    if balance.stopped:
        return 0
    if event is None or balance.terms.enforced == "measured":
        return None
    left = Filter(balance.terms).affordable(balance.charged, event)
    return None if left == UNLIMITED else left


def _up(epsilon: float | None) -> float | None:
    return None if epsilon is None or not math.isfinite(epsilon) else accounting.round_up(epsilon, DIGITS)


def _rest(promised: float | None, spent: float) -> float | None:
    shown = _up(spent)
    return (
        None if promised is None or shown is None else max(0.0, float(Decimal(repr(promised)) - Decimal(repr(shown))))
    )


RECOMPUTED_DIGITS = 9
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
    epsilon_pld: Mapping[str, float | None]


def recompute(balance: Balance, delta: float) -> Recomputed:
    """Evaluate the events in a ledger again."""
    charged = balance.charged
    best = accounting.epsilon(accounting.rdp(charged), delta)
    return Recomputed(
        delta=delta,
        epsilon_rdp=_finite(best.epsilon),
        best_order=best.order,
        epsilon_pld={f"{interval:g}": _on_grid(charged, delta, interval) for interval in INTERVALS},
    )


def _on_grid(charged: Mapping[Event, int], delta: float, interval: float) -> float | None:
    return _finite(accounting.pld_epsilon(charged, delta, interval))


def _finite(epsilon: float | None) -> float | None:
    return None if epsilon is None or not math.isfinite(epsilon) else accounting.round_up(epsilon, RECOMPUTED_DIGITS)
