"""The one writer of a ledger. What `lease` has returned is on disk, whatever happens next."""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from uuid import uuid4

from sqlalchemy import Connection

from services.budget.chain import Row, verified
from services.budget.errors import Fenced, LeaseRefused, LedgerCorrupt, LedgerMoved
from services.budget.filter import NO_LOSSES, Filter, Losses, are_losses
from services.budget.privacy_budget import PrivacyBudget
from services.budget.reader import replay
from services.budget.records import LARGEST_LEASE, Charged, Epoch, Leased, Opened, Record, Settled, Stopped, from_json
from services.budget.state import Balance, Lease, LedgerState
from services.budget.store import schema
from services.budget.store.database import Database
from services.budget.store.rows import append, rows
from services.privacy.events import Event
from services.privacy.randomness import uniform_below


@dataclass(frozen=True, slots=True)
class Grant:
    """`count` tokens may be released under this lease; none when the budget is used up."""

    lease: str
    count: int


class Ledger:
    """Opens, or with `create` makes, the ledger at a path or URL, verifies all of it, and begins a new epoch in it.

    From then on every other writer of the same ledger raises Fenced. Threads may share one of these.

    Raises:
        LedgerMismatch: it keeps another promise than `terms`.
        LedgerError: it cannot be used; the subclass and the message say why.
    """

    def __init__(self, ledger: str | Path, terms: PrivacyBudget, *, create: bool = True) -> None:
        self.terms = terms
        self.filter = Filter(terms)
        self._lock = threading.Lock()
        self._database = Database(ledger, "write")
        self._state = self._begin(Database(ledger, "create") if create else self._database, create=create)
        self._epoch = self._state.epoch

    @property
    def name(self) -> str:
        """The path or URL, without its password."""
        return self._database.name

    def lease(self, event: Event, wanted: int, lease: str | None = None) -> Grant:
        """Charges up to `wanted` tokens and grants what was charged; fewer, down to 0, at the end of the budget.

        A caller that names its `lease` may ask again when no answer came: it gets the grant that was written, not
        another one.

        Raises:
            LeaseRefused: a count below 1, a lease of that name over another event or already settled, or an event
                that JSON does not hold.
            LedgerError: nothing is granted. Should the row have reached the disk nevertheless, it stays charged.
        """
        if not 1 <= wanted <= LARGEST_LEASE:
            raise LeaseRefused(f"a lease is over 1 to {LARGEST_LEASE} tokens, not {wanted}")
        if event.measured:
            raise LeaseRefused(f"what a token of {event.kind} costs is known when it is made: charge it then")
        _check_recordable(event)
        lease = lease or uuid4().hex
        with self._lock:
            with self._database.transaction() as connection:
                self._catch_up(connection)
                if lease in self._state.leases:
                    return Grant(lease, _again(self._state.leases[lease], event))
                if self._state.stopped:
                    return Grant(lease, 0)
                count = self.filter.affordable(self._state.charged, event, wanted, self._state.losses)
                if count == 0:
                    return Grant(lease, 0)
                row = self._append(connection, Leased(lease=lease, event=json.loads(event.to_json()), count=count))
            self._state.apply(row)
        return Grant(lease, count)

    def charge(self, event: Event, tokens: Sequence[Sequence[float]], charge: str) -> int:
        """Charges tokens whose losses were measured; returns how many of the first of them may be released.

        Fewer than asked mean that the budget is used up. Where it limits the losses themselves that is for ever: the
        next token might cost less, and whether it did would tell about the text.

        Args:
            tokens: for each token its losses: one number for every part alike, or one for each part.
            charge: a name; asked again under it, the ledger answers as it did before.

        Raises:
            LeaseRefused: an event that is not measured, no tokens, or losses that are none.
            LedgerError: nothing may be released. Should the row have reached the disk, it stays charged.
        """
        if not event.measured:
            raise LeaseRefused(f"tokens of {event.kind} are leased, not charged with losses")
        if not 1 <= len(tokens) <= LARGEST_LEASE or not all(map(are_losses, tokens)):
            raise LeaseRefused("a charge is over at least 1 token, each with losses that are no negative numbers")
        _check_recordable(event)
        with self._lock:
            with self._database.transaction() as connection:
                self._catch_up(connection)
                if charge in self._state.charges:
                    return self._state.charges[charge]
                if self._state.stopped:
                    return 0
                fitting = self.filter.affordable_measured(self._state.charged, self._state.losses, event, tokens)
                count = int(min(fitting, self._state.measured_left))
                records: list[Record] = [_charged(charge, event, tokens[:count])] if count else []
                if count < len(tokens) and self.terms.enforced == "measured":
                    records.append(Stopped(charge=charge))
                written = self._append_all(connection, records)
            for row in written:
                self._state.apply(row)
        return count

    def settle(self, lease: str, used: int) -> None:
        """Ends a lease and returns what was not used to the budget. Settling again alike changes nothing.

        A lease of an earlier epoch may be settled too. Its holder lives on when the budget actor is replaced, and
        what makes a lease good is its row, not who wrote it; nobody but its holder knows its name.

        Raises:
            LeaseRefused: no such lease, more used than granted, or settled before with another number.
            LedgerError: nothing is returned.
        """
        with self._lock:
            with self._database.transaction() as connection:
                self._catch_up(connection)
                if lease not in self._state.leases:
                    raise LeaseRefused(f"{self.name} holds no lease {lease!r}")
                before = self._state.leases[lease]
                if before.settled(used) == before:
                    return
                row = self._append(connection, Settled(lease=lease, used=used))
            self._state.apply(row)

    def check(self) -> None:
        """Returns if a token could be charged now, the budget aside.

        Raises:
            LedgerError: what a charge would raise: Fenced, LedgerUnavailable and so on.
        """
        with self._lock, self._database.transaction() as connection:
            self._catch_up(connection)

    def balance(self) -> Balance:
        """Where the ledger stands by this writer's knowledge; a copy."""
        with self._lock:
            return self._state.balance()

    def _begin(self, database: Database, *, create: bool) -> LedgerState:
        with database.transaction() as connection:
            if schema.migrate(connection, create=create):
                append(connection, None, 0, _opened(self.terms))
            state = replay(connection)
            _stay(state)
            state.terms.demand(self.terms)
            row = append(connection, state.head, state.epoch + 1, Epoch())
        state.apply(row)
        return state

    def _catch_up(self, connection: Connection) -> None:
        """Makes sure that this writer may write, and knows every row.

        There is a row that it does not know when a commit was not confirmed and happened all the same.
        """
        found = list(rows(connection, since=self._state.head.seq))
        if found[:1] != [self._state.head]:
            raise LedgerCorrupt(
                f"row {self._state.head.seq} is gone or another one: the ledger was replaced while in use"
            )
        if (newest := found[-1].epoch) > self._epoch:
            raise Fenced(f"the writer of epoch {self._epoch} was replaced by that of epoch {newest} and writes no more")
        for row in verified(found[1:], self._state.head):
            self._state.apply(row)
        _stay(self._state)

    def _append_all(self, connection: Connection, records: Sequence[Record]) -> list[Row]:
        written: list[Row] = []
        for record in records:
            head = written[-1] if written else self._state.head
            written.append(append(connection, head, self._epoch, record))
        return written

    def _append(self, connection: Connection, record: Record) -> Row:
        return append(connection, self._state.head, self._epoch, record)


def _opened(terms: PrivacyBudget) -> Opened:
    stop_after = None if terms.stop_within is None else 1 + uniform_below(terms.stop_within)
    return Opened(terms=terms, stop_after=stop_after)


def _charged(charge: str, event: Event, tokens: Sequence[Sequence[float]]) -> Charged:
    total = reduce(Losses.plus, tokens, NO_LOSSES)
    losses = total.parts or (total.alike,)
    return Charged(charge=charge, event=json.loads(event.to_json()), count=len(tokens), losses=losses)


def _check_recordable(event: Event) -> None:
    if from_json(event.to_json()) != event:
        raise LeaseRefused(f"{event} does not come back from its JSON, so the ledger could not be read again")


def _again(lease: Lease, event: Event) -> int:
    if lease.event != event or lease.used is not None:
        raise LeaseRefused("a lease of this name was granted before, over another event or settled since")
    return lease.count


def _stay(state: LedgerState) -> None:
    if state.moved is not None:
        raise LedgerMoved(
            f"it was moved to {state.moved} and goes on there: configure that place. It is never written here again, "
            "because two ledgers of one budget would spend it twice"
        )
