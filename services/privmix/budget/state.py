"""Computes the state of a ledger from its rows."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from pydantic_core import to_json

from privmix.budget.accounts import NO_ACCOUNTS, Accounts, Grains
from privmix.budget.chain import LedgerRow, verified
from privmix.budget.filter import NO_LOSSES, Losses, are_losses
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.records import (
    KINDS,
    Charged,
    Checkpoint,
    Epoch,
    Forfeited,
    Leased,
    Opened,
    Record,
    Settled,
    Signed,
    Stopped,
)
from privmix.foundation.errors import LeaseRefused, LedgerCorrupt, LedgerForeign
from privmix.privacy.events import Event, from_json

# The number of closed leases and of charges that a checkpoint keeps, so that a call repeated by Ray gets its first
# answer.
REMEMBERED = 1_000

# The number of former holders that the state keeps.
REMEMBERED_HOLDERS = 100


@dataclass(frozen=True, slots=True)
class Lease:
    """Holds tokens charged in advance. `used` is None until the lease is settled.

    `allowances` are the grains that each token may charge to each part's account, for an event with accounts.
    """

    event: Event
    count: int
    used: int | None = None
    allowances: Grains = ()

    @property
    def held(self) -> Grains:
        """The grains set aside for all of its tokens, by part."""
        return tuple(self.count * allowance for allowance in self.allowances)

    def settled(self, used: int, charges: Grains = ()) -> "Lease":
        """Returns the settled lease.

        Raises:
            LeaseRefused: more tokens are used than granted, the lease was settled with another number, or the charges
                are not those of `used` tokens within their allowances.
        """
        if not 0 <= used <= self.count:
            raise LeaseRefused(f"a lease of {self.count} tokens cannot have {used} used tokens")
        if self.used not in (None, used):
            raise LeaseRefused(f"the lease was settled before, at {self.used} tokens; it cannot be settled at {used}")
        if self.used is None and (
            len(charges) != len(self.allowances)
            or not all(0 <= own <= used * most for own, most in zip(charges, self.allowances, strict=True))
        ):
            raise LeaseRefused(
                f"a lease needs the charges of its {used} used tokens to each account, within its allowances"
            )
        return Lease(self.event, self.count, used)


class Signature(NamedTuple):
    """Holds the row with the last signature of a chain, which nothing here has checked (`privmix.budget.signing`)."""

    row: LedgerRow
    signed: Signed


@dataclass(frozen=True)
class Balance:
    """Summarizes the state of a ledger.

    Attributes:
        charged: the number of tokens charged for each event, open leases included.
        held: the number of tokens in open leases for each event: granted, and not known to be released.
        latest: the event of the last charge.
        rows: the length of the chain.
        head: the hash of the last row.
        losses: the losses measured on the private text.
        stopped: whether the ledger has stopped: it grants no more private tokens.
        id: the permanent id of the ledger.
        accounts: what was charged to each part's account. It is private.
        clients_needed_keys: whether clients of a service with this ledger ever needed a key.
        signature: the last signature in the rows that were read; None if they have none.
    """

    terms: PrivacyBudget
    charged: Mapping[Event, int]
    held: Mapping[Event, int]
    latest: Event | None
    epoch: int
    rows: int
    head: str
    losses: Losses = NO_LOSSES
    stopped: bool = False
    id: str = ""
    accounts: Accounts = NO_ACCOUNTS
    clients_needed_keys: bool = False
    signature: Signature | None = None


class LedgerState:
    """Holds the state of one ledger. Only rows change it, one at a time."""

    def __init__(self, first: LedgerRow) -> None:
        """Initializes the state from the first row of a ledger or from a checkpoint.

        Raises:
            LedgerCorrupt: the row is neither.
            LedgerForeign: this version does not understand the row.
        """
        self.leases: dict[str, Lease] = {}
        self.charges: dict[str, int] = {}
        self.losses = NO_LOSSES
        self.accounts = NO_ACCOUNTS
        self.stopped = False
        self.clients_needed_keys = False
        self.signature: Signature | None = None
        self.charged: Counter[Event] = Counter()
        self.held: Counter[Event] = Counter()
        self.latest: Event | None = None
        self.writer: str | None = None
        self.holders: tuple[str | None, ...] = ()
        self.epoch = first.epoch
        self.head = first
        self.checkpointed = first.seq
        self._closed: dict[str, None] = {}
        match _record(first):
            case Opened() as opened:
                self.id = opened.id
                self.terms, self.stop_after = opened.terms, opened.stop_after
            case Checkpoint() as checkpoint:
                self._restore(checkpoint)
            case _:
                raise LedgerCorrupt(f"row {first.seq} does not state the budget")

    @classmethod
    def replay(cls, rows: Iterable[LedgerRow], before: LedgerRow | None = None) -> "LedgerState":
        """Verifies the rows and returns the state after them.

        Args:
            rows: all rows of a ledger, or the rows from a checkpoint on.
            before: the row before that checkpoint.

        Raises:
            LedgerCorrupt: a row was changed, or contradicts the rows before it.
            LedgerForeign: there are no rows, or this version does not understand a row.
        """
        remaining = verified(rows, before)
        if (first := next(remaining, None)) is None:
            raise LedgerForeign("the ledger is empty")
        state = cls(first)
        for row in remaining:
            state.apply(row)
        return state

    def apply(self, row: LedgerRow) -> None:
        """Applies the row that follows `head`."""
        record = _record(row)
        if row.epoch != self.epoch + isinstance(record, Epoch):
            raise LedgerCorrupt(f"row {row.seq} was written in epoch {row.epoch} while epoch {self.epoch} was current")
        match record:
            case Epoch():
                self.epoch, self.writer = row.epoch, record.writer
                self.clients_needed_keys |= record.clients_needed_keys
                others = (holder for holder in self.holders if holder != record.holder)
                self.holders = (*others, record.holder)[-REMEMBERED_HOLDERS:]
            case Leased() if record.lease not in self.leases:
                self._lease(record.lease, Lease(_event(row, record.event), record.count, allowances=record.allowances))
            case Settled() if record.lease in self.leases:
                try:
                    self._settle(record.lease, record.used, record.charges)
                except LeaseRefused as error:
                    raise LedgerCorrupt(f"row {row.seq}: {error}") from error
            case Charged() if record.charge not in self.charges and not self.stopped and are_losses(record.losses):
                self._charge(record, _event(row, record.event))
            case Stopped() if not self.stopped:
                self.charges.setdefault(record.charge, 0)
                self.stopped = True
            case Forfeited():
                self.latest = _event(row, record.event)
                self.charged[self.latest] += record.count
                self.accounts = self.accounts.settle((), record.charges)
            case Checkpoint():
                if record != self.checkpoint():
                    raise LedgerCorrupt(f"row {row.seq} (checkpoint) does not match the rows before it")
                self.checkpointed = row.seq
            case Signed():
                self.signature = Signature(row, record)
            case _:
                raise LedgerCorrupt(f"row {row.seq} ({record.kind}) contradicts the rows before it")
        self.head = row

    def checkpoint(self) -> Checkpoint:
        """Returns a record from which this state can be restored. Drops old leases and charges."""
        self._forget()
        events = list(self.charged)
        index = {event: number for number, event in enumerate(events)}
        return Checkpoint(
            id=self.id,
            terms=self.terms,
            stop_after=self.stop_after,
            events=tuple(event.as_dict() for event in events),
            charged=tuple(self.charged.values()),
            latest=None if self.latest is None else index[self.latest],
            leases=tuple((name, index[lease.event], lease.count, lease.used) for name, lease in self.leases.items()),
            allowances={name: lease.allowances for name, lease in self.leases.items() if lease.allowances},
            accounts=self.accounts.charged,
            charges=tuple(self.charges.items()),
            alike=self.losses.alike,
            parts=self.losses.parts,
            stopped=self.stopped,
            writer=self.writer,
            holders=self.holders,
            clients_needed_keys=self.clients_needed_keys,
        )

    @property
    def measured_left(self) -> float:
        """The number of measured tokens left before the randomly drawn stop; inf if none was drawn."""
        if self.stop_after is None:
            return math.inf
        return self.stop_after - sum(count for event, count in self.charged.items() if event.measured)

    def balance(self) -> Balance:
        return Balance(
            terms=self.terms,
            charged=+self.charged,
            held=+self.held,
            latest=self.latest,
            epoch=self.epoch,
            rows=self.head.seq,
            head=self.head.hash,
            losses=self.losses,
            stopped=self.stopped,
            id=self.id,
            accounts=self.accounts,
            clients_needed_keys=self.clients_needed_keys,
            signature=self.signature,
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        events = [_event(self.head, fields) for fields in checkpoint.events]
        self.id, self.terms, self.stop_after = checkpoint.id, checkpoint.terms, checkpoint.stop_after
        self.charged = Counter(dict(zip(events, checkpoint.charged, strict=True)))
        self.latest = None if checkpoint.latest is None else events[checkpoint.latest]
        self.leases = {
            name: Lease(events[event], count, used, checkpoint.allowances.get(name, ()))
            for name, event, count, used in checkpoint.leases
        }
        self._closed = {name: None for name, lease in self.leases.items() if lease.used is not None}
        for lease in self.leases.values():
            if lease.used is None:
                self.held[lease.event] += lease.count
                self.accounts = self.accounts.hold(lease.held)
        self.accounts = replace(self.accounts, charged=checkpoint.accounts)
        self.charges = dict(checkpoint.charges)
        self.losses = Losses(checkpoint.alike, checkpoint.parts)
        self.stopped = checkpoint.stopped
        self.writer, self.holders = checkpoint.writer, checkpoint.holders
        self.clients_needed_keys = checkpoint.clients_needed_keys

    def _forget(self) -> None:
        self._closed = dict.fromkeys(_last(self._closed))
        still_open = {name: lease for name, lease in self.leases.items() if lease.used is None}
        self.leases = still_open | {name: self.leases[name] for name in self._closed}
        self.charges = {name: self.charges[name] for name in _last(self.charges)}

    def _lease(self, name: str, lease: Lease) -> None:
        self.leases[name] = lease
        self.charged[lease.event] += lease.count
        self.held[lease.event] += lease.count
        self.accounts = self.accounts.hold(lease.held)
        self.latest = lease.event

    def _charge(self, record: Charged, event: Event) -> None:
        self.charges[record.charge] = record.count
        self.charged[event] += record.count
        self.losses = self.losses.plus(record.losses)
        self.latest = event

    def _settle(self, name: str, used: int, charges: Grains) -> None:
        lease = self.leases[name]
        self.leases[name] = lease.settled(used, charges)
        if lease.used is None:
            self.accounts = self.accounts.settle(lease.held, charges)
            self.charged[lease.event] -= lease.count - used
            self.held[lease.event] -= lease.count
            self._closed[name] = None


def _last(names: Mapping[str, Any]) -> Iterable[str]:
    return islice(names, max(0, len(names) - REMEMBERED), None)


def _record(row: LedgerRow) -> Record:
    try:
        return KINDS[row.kind].model_validate_json(row.body)
    except (KeyError, ValueError) as error:
        raise LedgerForeign(f"row {row.seq} ({row.kind}) has a format that this version does not know") from error


def _event(row: LedgerRow, fields: Mapping[str, Any]) -> Event:
    try:
        return from_json(to_json(fields, inf_nan_mode="constants").decode())
    except ValueError as error:
        raise LedgerForeign(f"row {row.seq} has an event that this version does not know: {error}") from error
