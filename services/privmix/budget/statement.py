"""States the budget, what is spent and what is left, for people and for programs."""

import json
import math
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict

from privmix.budget.filter import UNLIMITED, Filter
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.sentence import DIGITS, guarantee_sentence, promised_epsilon
from privmix.budget.state import Balance
from privmix.budget.token_counter import TokenCounter
from privmix.privacy import accounting
from privmix.privacy.events import Event
from privmix.privacy.settings import Enforced

NOTE = (
    "The guarantee is epsilon and delta, for everything that is ever released. epsilon_spent, epsilon_left and "
    "tokens_left are accounts of the charges so far: estimates, and no guarantee at a moment that is chosen after "
    "looking at answers."
)

ACCOUNTS_NOTE = (
    "The guarantee is epsilon and delta, for everything that is ever released. It is paid once, for all tokens: "
    "each part has an account, which its own tokens empty. Answers fade into the base model's after about `horizon` "
    "tokens and never end. What the accounts hold, and how many are empty, is private."
)

MEASURED_NOTE = (
    "No epsilon is promised: the service stops when losses that are measured on the private text reach a limit, and "
    "clients see that it stops. epsilon_spent bounds the charges so far without regard to the text, where such a bound "
    "is known: an estimate, and no guarantee at a moment that is chosen after looking at answers."
)

UNLIMITED_NOTE = (
    "No epsilon is promised, because the budget has no limit. epsilon_spent is an account of the charges so far: an "
    "estimate, and no guarantee at a moment that is chosen after looking at answers."
)


class Charge(BaseModel):
    """Counts the tokens charged at the cost of one event, open leases included."""

    model_config = ConfigDict(frozen=True)

    event: dict[str, Any]
    status: str
    tokens: int


class Statement(BaseModel):
    """States what clients may know. Nothing here depends on the private text, except when measured losses end it.

    The guarantee is `epsilon` and `delta`, for everything that is ever released. A Rényi filter at `order` enforces it,
    even if events depend on earlier answers (Feldman & Zrnic 2021), or a `counter` does (`TokenCounter`). Neither
    guarantees anything at a moment that is chosen after looking at answers, so `epsilon_spent` is an estimate (`note`).
    Numbers are None if they are unknown, unlimited or private.

    Attributes:
        epsilon: the budget's, or the cost of the charged tokens where it is more (`promised_epsilon`). None, too, if
            the budget limits measured losses: `exhausted` and `stopped` depend on the text then.
        epsilon_spent: the epsilon of the data-independent bounds of all charged tokens at the best Rényi order,
            rounded up to `DIGITS` decimals (`Filter.estimate`).
        epsilon_left: `epsilon` minus `epsilon_spent`, rounded down; 0 if the tokens cost more than the budget.
        tokens_left: the number of tokens left at the cost of `event`, the current event.
        exhausted: whether no tokens are left.
        base: the event of the private base, which `epsilon_spent` contains from the start; None for a public model.
        epsilon_base: the epsilon of the base alone, rounded up.
        stopped: whether the ledger has stopped for ever.
        horizon: the number of tokens over which the parts plan to spend their accounts; None without accounts.
    """

    model_config = ConfigDict(frozen=True)

    epsilon: float | None
    delta: float
    order: float
    adjacency: str
    enforced: Enforced
    counter: TokenCounter | None = None
    stop_within: int | None
    guarantee: str
    epsilon_spent: float | None
    epsilon_left: float | None
    note: str
    tokens_charged: int
    tokens_left: int | None
    exhausted: bool
    stopped: bool
    horizon: int | None = None
    event: dict[str, Any] | None
    base: dict[str, Any] | None = None
    epsilon_base: float | None = None


class LedgerStatement(Statement):
    """Adds details of the ledger, for the operator. Only `head` depends on private text, as a hash of what was charged.

    Attributes:
        partition, parts: the id of the partition to which a ledger with accounts belongs, and the number of its parts;
            None for another ledger.
        epsilon_bound: the epsilon that the filter compares with the budget's: by the data-independent bounds of all
            charged tokens at `order`, or by the privacy loss distribution if there was only one release, paid once, or
            a counter.
        tokens_held: the number of tokens in open leases. They are charged, but may never be released.
        charges: the tokens charged, by event.
        rows, head: the length of the chain and the hash of its last row. Who notes it can show later that no row was
            removed from its end (`reading.verify`).
    """

    ensemble: str
    partition: str | None = None
    parts: int | None = None
    epsilon_bound: float | None
    tokens_held: int
    charges: tuple[Charge, ...]
    epoch: int
    rows: int
    head: str


class OperatorStatement(LedgerStatement):
    """Adds what only the operator may know: what depends on the private text.

    Attributes:
        epsilon_measured: the epsilon of all tokens at `order`, for the part with the largest loss; None if no losses
            were measured.
        epsilon_measured_left: `epsilon` minus `epsilon_measured`, if the budget limits measured losses.
    """

    epsilon_measured: float | None
    epsilon_measured_left: float | None

    def ledger(self) -> LedgerStatement:
        """Returns the fields that do not depend on the private text."""
        return LedgerStatement(**{name: getattr(self, name) for name in LedgerStatement.model_fields})

    def client(self) -> Statement:
        """Returns the fields that clients may know. A limit of measured losses promises no epsilon to anybody."""
        promised = {"epsilon": None} if self.enforced == "measured" else {}
        return Statement(**{name: getattr(self, name) for name in Statement.model_fields} | promised)


def statement(balance: Balance, event: Event | None = None) -> OperatorStatement:
    """Returns the statement of a balance. It counts what is left in tokens of `event`, by default the latest event."""
    terms, charged = balance.terms, balance.charged
    event = event or balance.latest
    by_bounds = Filter(terms.model_copy(update={"enforced": "bound"}))
    bound, spent = by_bounds.epsilon(charged), by_bounds.estimate(charged)
    tokens, left = sum(charged.values()), _tokens_left(balance, event)
    measured = _measured(balance)
    limits_bound, promised = terms.enforced == "bound", promised_epsilon(terms, bound)
    # Beyond the budget nothing is left, whatever the estimate, which is smaller than the bound, would leave.
    rest = _rest(terms.epsilon, spent) if promised == terms.epsilon else 0.0
    return OperatorStatement(
        **terms.model_dump(exclude={"base", "epsilon"}),
        epsilon=None if promised == math.inf else promised,
        base=None if terms.base is None else json.loads(terms.base),
        epsilon_base=rounded_up(Filter(terms).epsilon({})) if terms.base else None,
        guarantee=guarantee_sentence(
            terms, [*charged, *filter(None, [event])], None if left is None else tokens + left, bound
        ),
        epsilon_spent=rounded_up(spent),
        epsilon_left=rest if limits_bound else None,
        epsilon_bound=rounded_up(bound),
        exhausted=left == 0,
        epsilon_measured=rounded_up(measured),
        epsilon_measured_left=None if limits_bound or measured is None else _rest(terms.epsilon, measured),
        tokens_charged=tokens,
        tokens_held=sum(balance.held.values()),
        tokens_left=left,
        stopped=balance.stopped,
        note=_note(terms),
        event=None if event is None else event.as_dict(),
        charges=tuple(
            Charge(event=paid.as_dict(), status=paid.guarantee.status, tokens=count) for paid, count in charged.items()
        ),
        epoch=balance.epoch,
        rows=balance.rows,
        head=balance.head,
    )


def _note(terms: PrivacyBudget) -> str:
    """Returns what the numbers of the statement mean, and whether they promise anything."""
    if terms.enforced == "measured":
        return MEASURED_NOTE
    if terms.epsilon is None:
        return UNLIMITED_NOTE
    return NOTE if terms.horizon is None else ACCOUNTS_NOTE


def _measured(balance: Balance) -> float | None:
    if not any(event.measured for event in balance.charged):
        return None
    terms = balance.terms.model_copy(update={"enforced": "measured"})
    return Filter(terms).epsilon(balance.charged, balance.losses)


def _tokens_left(balance: Balance, event: Event | None) -> int | None:
    """Returns the number of tokens left; None if it has no limit or depends on future or private losses."""
    if balance.stopped:
        return 0
    if event is None or balance.terms.enforced == "measured":
        return None
    left = Filter(balance.terms).affordable(balance.charged, event)
    return None if left == UNLIMITED else left


def rounded_up(epsilon: float | None) -> float | None:
    """Returns an epsilon rounded up; None if it is unknown or infinite."""
    return None if epsilon is None or not math.isfinite(epsilon) else accounting.round_up(epsilon, DIGITS)


def _rest(promised: float | None, spent: float) -> float | None:
    shown = rounded_up(spent)
    return (
        None if promised is None or shown is None else max(0.0, float(Decimal(repr(promised)) - Decimal(repr(shown))))
    )
