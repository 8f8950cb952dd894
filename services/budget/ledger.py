"""The one writer of a ledger. What `lease` has returned is on disk, whatever happens next."""

import json
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from sqlalchemy import Connection

from services.budget.chain import Row, verified
from services.budget.errors import Fenced, LeaseRefused, LedgerCorrupt, LedgerMoved
from services.budget.filter import NO_LOSSES, Filter, Losses, are_losses
from services.budget.privacy_budget import PrivacyBudget
from services.budget.reader import demand, replay
from services.budget.records import (
    LARGEST_LEASE,
    Charged,
    Epoch,
    Forfeited,
    Leased,
    Opened,
    Record,
    Settled,
    Stopped,
    from_json,
)
from services.budget.state import Balance, Lease, LedgerState
from services.budget.store import schema
from services.budget.store.database import Database
from services.budget.store.rows import append, beat, end, following, rows, silence_s
from services.privacy.events import Event
from services.privacy.sampling.randomness import uniform_below

T = TypeVar("T")

# A writer appends a checkpoint after this many rows, so that a start replays no more than about these.
CHECKPOINT_ROWS = 10_000

# Calls that share one transaction, at most: enough to keep a slow disk busy, and a transaction short.
LARGEST_BATCH = 256

# What is granted at least where further tokens cost nothing: two rows for so many tokens.
FREE_LEASE = 2**14

# A writer that has not told for this long that it lives has ended: one that it replaced may take the ledger back.
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Grant:
    """`count` tokens may be released under this lease; none when the budget is used up.

    `held` counts the tokens in all open leases where fewer were granted than wanted: their holders may return some.
    """

    lease: str
    count: int
    held: int = 0


Decision = tuple[T, Sequence[Record]]


class Ledger:
    """Opens, or with `create` makes, the ledger at a path or URL, and writes it. It has one writer at a time.

    Without a `holder` it takes the ledger over now, and writes until another writer does. A deployment names itself as
    the `holder`: it takes the ledger over at its first write, when it serves. One that another has replaced raises
    Fenced, and takes the ledger back only once the other has released it, or was silent for `PATIENCE_S`. Threads may
    share one of these; calls that wait at the same time are committed together, in one transaction.

    Args:
        ledger: a path or URL.
        terms: the budget that it must keep.
        create: make it where there is none, under the name `identity`.
        identity: the id of the ledger that must be there; None accepts any.
        holder: the name of the deployment, the same after a restart of the process.

    Raises:
        LedgerMismatch: it keeps another budget than `terms`, or is another ledger.
        LedgerError: it cannot be used; the subclass and the message say why.
    """

    def __init__(
        self,
        ledger: str | Path,
        terms: PrivacyBudget,
        *,
        create: bool = True,
        identity: str | None = None,
        holder: str | None = None,
    ) -> None:
        self.terms = terms
        self.filter = Filter(terms)
        self._writer = uuid4().hex
        self._holder = holder
        self._epoch: int | None = None
        self._waiting: deque[_Call] = deque()
        self._turn = threading.Condition()
        self._busy = False
        self._database = Database(ledger, "write")
        self._state: LedgerState | None = self._begin(
            Database(ledger, "create") if create else self._database, create=create, identity=identity
        )
        self._confirmed, self._balance = self._state.head, self._state.balance()
        if holder is None:
            self.take_over()

    @property
    def name(self) -> str:
        """The path or URL, without its password."""
        return self._database.name

    def lease(self, event: Event, wanted: int, lease: str | None = None) -> Grant:
        """Charges up to `wanted` tokens and grants what was charged; fewer, down to 0, at the end of the budget.

        A caller that names its `lease` may ask again when no answer came: it gets the grant that was written, not
        another one. Where further tokens cost nothing, more are granted than wanted.

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
        name = lease or uuid4().hex

        def decide(state: LedgerState) -> Decision[Grant]:
            if name in state.leases:
                return Grant(name, _again(state.leases[name], event)), ()
            if state.stopped:
                return Grant(name, 0), ()
            enough = max(wanted, FREE_LEASE) if self.filter.is_free(state.charged, event) else wanted
            count = self.filter.affordable(state.charged, event, enough, state.losses)
            held = state.held.total() if count < wanted else 0
            if count == 0:
                return Grant(name, 0, held), ()
            return Grant(name, count, held), [Leased(lease=name, event=json.loads(event.to_json()), count=count)]

        return self._commit(decide)

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

        def decide(state: LedgerState) -> Decision[int]:
            if charge in state.charges:
                return state.charges[charge], ()
            if state.stopped:
                return 0, ()
            fitting = self.filter.affordable_measured(state.charged, state.losses, event, tokens)
            count = int(min(fitting, state.measured_left))
            records: list[Record] = [_charged(charge, event, tokens[:count])] if count else []
            if count < len(tokens) and self.terms.enforced == "measured":
                records.append(Stopped(charge=charge))
            return count, records

        return self._commit(decide)

    def settle(self, lease: str, used: int) -> None:
        """Ends a lease and returns what was not used to the budget. Settling again alike changes nothing.

        A lease of an earlier epoch may be settled too. Its holder lives on when the budget actor is replaced, and
        what makes a lease good is its row, not who wrote it; nobody but its holder knows its name.

        Raises:
            LeaseRefused: no such lease, more used than granted, or settled before with another number.
            LedgerError: nothing is returned.
        """

        def decide(state: LedgerState) -> Decision[None]:
            if lease not in state.leases:
                raise LeaseRefused(f"{self.name} holds no lease {lease!r}")
            before = state.leases[lease]
            if before.settled(used) == before:
                return None, ()
            return None, [Settled(lease=lease, used=used)]

        return self._commit(decide)

    def forfeit(self, count: int) -> Event:
        """Charges tokens that may have been released without a row: what a restored backup does not know of.

        They are charged at the cost of the event charged last, which is returned, whether or not the budget holds
        them. Where the budget limits measured losses, nobody knows those of the tokens: the ledger stops.

        Raises:
            LeaseRefused: an impossible count, or a ledger in which nothing was charged yet.
        """
        if not 1 <= count <= LARGEST_LEASE:
            raise LeaseRefused(f"1 to {LARGEST_LEASE} tokens are forfeited at a time, not {count}")

        def decide(state: LedgerState) -> Decision[Event]:
            if (event := state.latest) is None:
                raise LeaseRefused("nothing was ever charged in it, so it does not say what a token costs")
            records: list[Record] = [Forfeited(event=json.loads(event.to_json()), count=count)]
            if event.measured and self.terms.enforced == "measured" and not state.stopped:
                records.append(Stopped(charge=uuid4().hex))
            return event, records

        return self._commit(decide)

    def take_over(self) -> None:
        """Become the ledger's writer now, if this may be.

        Raises:
            Fenced: another writer has the ledger.
        """
        self._commit(lambda state: (None, ()))

    def resume(self) -> None:
        """Become the writer again after a restart, if this deployment had the ledger."""
        if self._state is not None and self._state.holders[-1:] == (self._holder,):
            self.take_over()

    def check(self) -> None:
        """Returns if a token could be charged now, the budget aside. Takes nothing over.

        Raises:
            LedgerError: what a charge would raise: Fenced, LedgerUnavailable and so on.
        """
        self._commit(lambda state: (None, ()), writes=False)

    def beat(self) -> None:
        """Tell others that this writer lives, if it has the ledger. Its deployment calls this every few seconds."""
        if self._epoch is not None:
            with self._database.transaction() as connection:
                if silence_s(connection, self._epoch) < math.inf:
                    beat(connection, self._epoch)

    def release(self) -> None:
        """Let another deployment take the ledger back at once."""
        if self._epoch is not None:
            with self._database.transaction() as connection:
                end(connection, self._epoch)

    def balance(self) -> Balance:
        """Where the ledger stands by what this writer knows to be on disk."""
        return self._balance

    def _begin(self, database: Database, *, create: bool, identity: str | None) -> LedgerState:
        with database.transaction() as connection:
            if schema.migrate(connection, create=create):
                append(connection, [following(None, 0, _opened(self.terms, identity))])
            state = replay(connection)
            _stay(state)
            demand(state, self.terms, identity)
        return state

    def _commit(self, decide: Callable[[LedgerState], Decision[T]], *, writes: bool = True) -> T:
        """Has a decision made and its rows committed, together with those of other threads that wait."""
        call = _Call(decide, writes)
        with self._turn:
            self._waiting.append(call)
            while not call.done:
                if self._busy:
                    self._turn.wait()
                else:
                    self._commit_waiting()
        result: T = call.outcome()
        return result

    def _commit_waiting(self) -> None:
        """Commits the calls that wait; others may begin to wait meanwhile. The caller has the turn."""
        self._busy = True
        calls = [self._waiting.popleft() for _ in range(min(len(self._waiting), LARGEST_BATCH))]
        self._turn.release()
        try:
            self._write(calls)
        finally:
            self._turn.acquire()
            self._busy = False
            for call in calls:
                call.done = True
            self._turn.notify_all()

    def _write(self, calls: Sequence["_Call"]) -> None:
        """Commits these calls in one transaction; where it fails, all of them fail."""
        try:
            with self._database.transaction() as connection:
                state = self._caught_up(connection)
                takes_over = self._must_take_over(connection, state) and any(call.writes for call in calls)
                self._state = None  # from here on it holds rows that are not on disk
                written: list[Row] = []
                if takes_over:
                    written += applied(state, [Epoch(writer=self._writer, holder=self._holder)])
                    beat(connection, state.epoch)
                for call in calls:
                    written += applied(state, call.decide(state))
                append(connection, written)
            self._state, self._confirmed, self._balance = state, state.head, state.balance()
            if state.writer == self._writer:
                self._epoch = state.epoch
        except BaseException as error:
            for call in calls:
                call.error = error
            if not isinstance(error, Exception):
                raise

    def _caught_up(self, connection: Connection) -> LedgerState:
        """The state after every row on disk.

        It may lack rows of others, and its own where a commit was not confirmed and happened all the same.
        """
        state, self._state = self._state, None
        recent = rows(connection, since=self._confirmed.seq)
        if next(recent, None) != self._confirmed:
            raise LedgerCorrupt(
                f"row {self._confirmed.seq} is gone or another one: the ledger was replaced while in use"
            )
        if state is None:
            state = replay(connection)
        else:
            for row in verified(recent, self._confirmed):
                state.apply(row)
        self._state, self._confirmed = state, state.head
        _stay(state)
        return state

    def _must_take_over(self, connection: Connection, state: LedgerState) -> bool:
        """Whether this writer must begin an epoch before it writes; False where the current one is its own.

        Raises:
            Fenced: another writer has the ledger, and this one may not take it.
        """
        if state.writer == self._writer:
            return False
        before = "a writer" if self._epoch is None else f"the writer of epoch {self._epoch}"
        replaced = f"{before} of this deployment was replaced by that of epoch {state.epoch}"
        last = state.holders[-1] if state.holders else None
        if self._holder is None or self._holder == last:
            if self._epoch is not None:  # by its own successor
                raise Fenced(f"{replaced} and writes no more")
            return True
        if self._holder in state.holders and silence_s(connection, state.epoch) < PATIENCE_S:
            raise Fenced(f"{replaced}; it goes on once the other deployment has ended, or is silent")
        return True


class _Call:
    """A decision that waits for the next transaction, and what came of it."""

    def __init__(self, decide: Callable[[LedgerState], Decision[Any]], writes: bool) -> None:
        self.writes = writes
        self._decide = decide
        self._result: Any = None
        self.error: BaseException | None = None
        self.done = False

    def decide(self, state: LedgerState) -> Sequence[Record]:
        """The records that the decision adds; none where it refuses, for which nobody else's call fails."""
        try:
            self._result, records = self._decide(state)
        except ValueError as error:  # LeaseRefused too
            self.error = error
            return ()
        return records

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self._result


def applied(state: LedgerState, records: Sequence[Record]) -> list[Row]:
    """The rows of these records, taken into account in the state; a checkpoint follows them when one is due."""
    written: list[Row] = []
    for record in records:
        written.append(following(state.head, state.epoch + isinstance(record, Epoch), record))
        state.apply(written[-1])
    if records and state.head.seq - state.checkpointed >= CHECKPOINT_ROWS:
        written.append(following(state.head, state.epoch, state.checkpoint()))
        state.apply(written[-1])
    return written


def _opened(terms: PrivacyBudget, identity: str | None) -> Opened:
    stop_after = None if terms.stop_within is None else 1 + uniform_below(terms.stop_within)
    return Opened(id=identity or uuid4().hex, terms=terms, stop_after=stop_after)


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
