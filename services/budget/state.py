"""What the rows of a ledger add up to."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.budget.chain import Row, verified
from services.budget.errors import LeaseRefused, LedgerCorrupt, LedgerForeign
from services.budget.filter import NO_LOSSES, Losses, are_losses
from services.budget.privacy_budget import PrivacyBudget
from services.budget.records import KINDS, Charged, Epoch, Leased, Moved, Opened, Record, Settled, Stopped, from_json
from services.privacy.events import Event


@dataclass(frozen=True, slots=True)
class Lease:
    """Tokens charged in advance. `used` is None until the holder settles."""

    event: Event
    count: int
    used: int | None = None

    def settled(self, used: int) -> "Lease":
        """Raises LeaseRefused when that cannot be: more than was granted, or settled otherwise before."""
        if not 0 <= used <= self.count:
            raise LeaseRefused(f"{used} tokens cannot have been used of a lease of {self.count}")
        if self.used not in (None, used):
            raise LeaseRefused(f"the lease was settled before, at {self.used} tokens used, and cannot be at {used}")
        return replace(self, used=used)


@dataclass(frozen=True)
class Balance:
    """Where a ledger stands.

    `charged` counts tokens by event, those of open leases included; `held` counts the open leases' tokens alone:
    granted, and not known to be released. `latest` is the event charged last. `rows` and `head` are the length of the
    chain and the hash of its last row. `losses` were measured on the private text; `stopped` says that they left no
    room, and that nothing private is released any more. `moved` names the place where the ledger goes on instead.
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
    moved: str | None = None


class LedgerState:
    """The state of one ledger, moved forward a row at a time; rows are the only way to change it."""

    def __init__(self, rows: Iterable[Row]) -> None:
        """Replays a whole ledger.

        Raises:
            LedgerCorrupt: a row is not what was written, or cannot have been written by a working ledger.
            LedgerForeign: there is no row, or one that this version does not understand.
        """
        self.leases: dict[str, Lease] = {}
        self.charges: dict[str, int] = {}
        self.losses = NO_LOSSES
        self.stopped = False
        self.moved: str | None = None
        self.charged: Counter[Event] = Counter()
        self.held: Counter[Event] = Counter()
        self.latest: Event | None = None
        self.epoch = 0
        remaining = verified(rows)
        self.head = next(remaining, None) or _empty()
        first = _record(self.head)
        if not isinstance(first, Opened):
            raise LedgerCorrupt("row 1 does not say what is promised")
        self.terms = first.terms
        self.stop_after = first.stop_after
        for row in remaining:
            self.apply(row)

    def apply(self, row: Row) -> None:
        """Takes the row that follows `head` into account."""
        record = _record(row)
        if row.epoch != self.epoch + isinstance(record, Epoch):
            raise LedgerCorrupt(f"row {row.seq} was written in epoch {row.epoch} while epoch {self.epoch} was current")
        if self.moved is not None:
            raise LedgerCorrupt(f"row {row.seq} was written after the ledger had moved to {self.moved}")
        match record:
            case Epoch():
                self.epoch = row.epoch
            case Leased() if record.lease not in self.leases:
                self._lease(record.lease, Lease(_event(row, record.event), record.count))
            case Settled() if record.lease in self.leases:
                try:
                    self._settle(record.lease, record.used)
                except LeaseRefused as error:
                    raise LedgerCorrupt(f"row {row.seq}: {error}") from error
            case Charged() if record.charge not in self.charges and not self.stopped and are_losses(record.losses):
                self._charge(record, _event(row, record.event))
            case Stopped() if not self.stopped:
                self.charges.setdefault(record.charge, 0)
                self.stopped = True
            case Moved():
                self.moved = record.to
            case _:
                raise LedgerCorrupt(f"row {row.seq} ({record.kind}) contradicts the rows before it")
        self.head = row

    @property
    def measured_left(self) -> float:
        """How many more tokens may be charged with measured losses before a stop drawn at random."""
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
            moved=self.moved,
        )

    def _lease(self, name: str, lease: Lease) -> None:
        self.leases[name] = lease
        self.charged[lease.event] += lease.count
        self.held[lease.event] += lease.count
        self.latest = lease.event

    def _charge(self, record: Charged, event: Event) -> None:
        self.charges[record.charge] = record.count
        self.charged[event] += record.count
        self.losses = self.losses.plus(record.losses)
        self.latest = event

    def _settle(self, name: str, used: int) -> None:
        lease = self.leases[name]
        self.leases[name] = lease.settled(used)
        if lease.used is None:
            self.charged[lease.event] -= lease.count - used
            self.held[lease.event] -= lease.count


def _empty() -> Row:
    raise LedgerForeign("the ledger is empty")


def _record(row: Row) -> Record:
    try:
        return KINDS[row.kind].model_validate_json(row.body)
    except (KeyError, ValueError) as error:
        raise LedgerForeign(f"row {row.seq} ({row.kind}) is of a format that this version does not know") from error


def _event(row: Row, fields: Mapping[str, Any]) -> Event:
    try:
        return from_json(json.dumps(fields))
    except ValueError as error:
        raise LedgerForeign(f"row {row.seq} has an event that this version does not know: {error}") from error
