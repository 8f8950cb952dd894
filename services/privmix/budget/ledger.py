"""Implements the single writer of a ledger. A grant is on disk before `lease` or `charge` returns."""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar, Unpack
from uuid import uuid4

from sqlalchemy import Connection

from privmix.budget.accounts import Grains
from privmix.budget.anchor import Anchor, ChainEnd, anchored, is_same, lost_ends, rolled_back
from privmix.budget.chain import LedgerRow, verified
from privmix.budget.filter import NO_LOSSES, Filter, Losses, are_losses
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import check_same_ledger, replay, replay_whole
from privmix.budget.records import (
    MAX_LEASE,
    Charged,
    Epoch,
    Forfeited,
    Leased,
    Opened,
    Record,
    Settled,
    Signed,
    Stopped,
)
from privmix.budget.signing import SigningKey
from privmix.budget.state import Balance, Lease, LedgerState
from privmix.budget.store import schema
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import append, end_epoch, following, is_linked, rows, silence_s, write_beat
from privmix.foundation.errors import (
    Fenced,
    LeaseRefused,
    LedgerError,
    LedgerRolledBack,
    LedgerUnsigned,
    WorkError,
)
from privmix.privacy.events import Event, from_json
from privmix.privacy.sampling.randomness import uniform_below

T = TypeVar("T")

# A writer appends a checkpoint after this many rows, which bounds the rows that a start replays.
CHECKPOINT_ROWS = 10_000

# The maximum number of calls in one transaction: enough to use a slow disk well, and few enough to keep it short.
MAX_BATCH = 256

# The minimum size of a lease whose tokens cost nothing: it saves rows in the ledger.
FREE_LEASE = 2**14

# The Rényi order of a ledger of single releases. Pure epsilons cost least at high orders.
_RELEASES_ORDER = 64.0

# A writer without a heartbeat for this long counts as dead: a writer that it replaced may take the ledger back.
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Grant:
    """Permits the release of `count` tokens under a lease; 0 if the budget is used up.

    Attributes:
        allowances: the grains that each token may charge to each part's account, for an event with accounts.
    """

    lease: str
    count: int
    allowances: Grains = ()


Decision = tuple[T, Sequence[Record]]


class WriterOptions(TypedDict, total=False):
    """Says who writes a ledger.

    Attributes:
        identity: the id that the ledger has, or gets; None accepts any.
        holder: the name of the deployment, which does not change when the process restarts.
        anchors: the places that store the end of the chain outside the database. A grant waits until all have it.
        clients_need_keys: record that clients of the deployment need a key, when this writer takes over.
        key: signs each commit.
    """

    identity: str | None
    holder: str | None
    anchors: Sequence[Anchor]
    clients_need_keys: bool
    key: SigningKey | None


class Ledger:
    """Writes the ledger at a path or URL. A ledger has one writer at a time.

    Without a `holder`, the writer takes over the ledger when it opens it and writes until another writer takes over. A
    deployment names itself as `holder` and takes over with its first write. A deployment that was replaced gets Fenced;
    it may take the ledger back once the other deployment has released it or has sent no heartbeat for `PATIENCE_S`.
    The class is thread-safe: concurrent calls are committed together in one transaction.

    `create`, `open` and `restore` take a path or URL, and the privacy budget that the ledger must keep. They raise:

        LedgerMismatch: the ledger keeps another budget than `terms`, or has another id.
        LedgerUnsigned: the last row was not signed with `key`.
        LedgerRolledBack: an anchor knows rows that the ledger lacks.
        LedgerError: the ledger cannot be used. The subclass and the message say why.
    """

    def __init__(self, ledger: str | Path, terms: PrivacyBudget, options: WriterOptions, *, create: bool) -> None:
        self.terms = terms
        self.filter = Filter(terms)
        self._writer = uuid4().hex
        self._holder = options.get("holder")
        self._clients_need_keys = options.get("clients_need_keys", False)
        self._key = options.get("key")
        self._epoch: int | None = None
        self._waiting: deque[_Call] = deque()
        self._turn = threading.Condition()
        self._busy = False
        self._anchors = tuple(options.get("anchors", ()))
        self._lost: Mapping[str, ChainEnd] = {}
        # What each anchor stores, by its name: an end of this chain, or one in `_lost`.
        self._stored: dict[str, ChainEnd] = {}
        # Those that other writers of this ledger have stored, and that the rows read here do not reach yet.
        self._later: dict[str, ChainEnd] = {}
        # Charges before this writer's first commit may not be anchored: their writer may have died before.
        self._anchor_due = True
        self._anchor_failed = False
        self._database = LedgerDatabase(ledger, "write")
        self._state: LedgerState | None = self._begin(
            LedgerDatabase(ledger, "create") if create else self._database,
            create=create,
            identity=options.get("identity"),
        )
        self._confirmed, self._balance = self._state.head, self._state.balance()

    @classmethod
    def create(cls, ledger: str | Path, terms: PrivacyBudget, **options: Unpack[WriterOptions]) -> Self:
        """Creates a ledger, or opens an existing one and anchors its end.

        With a `key` it signs an existing ledger that was not signed, whose whole chain is verified.
        """
        created = cls(ledger, terms, options, create=True)
        created._refuse_lost_rows()
        created._anchor()
        created._start()
        return created

    @classmethod
    def open(cls, ledger: str | Path, terms: PrivacyBudget, **options: Unpack[WriterOptions]) -> Self:
        """Opens an existing ledger."""
        opened = cls(ledger, terms, options, create=False)
        opened._refuse_lost_rows()
        opened._start()
        return opened

    @classmethod
    def restore(cls, ledger: str | Path, terms: PrivacyBudget, **options: Unpack[WriterOptions]) -> Self:
        """Opens an existing ledger that may lack rows which an anchor knows. Only `forfeit` may follow."""
        return cls(ledger, terms, options, create=False)

    def _refuse_lost_rows(self) -> None:
        if self._lost:
            raise rolled_back(self._balance, self._lost).of(self.name)

    def _start(self) -> None:
        if self._holder is None:
            self.take_over()

    @property
    def name(self) -> str:
        """The path or URL, without its password."""
        return self._database.name

    def lease(self, event: Event, wanted: int, lease: str | None = None, parts: int | None = None) -> Grant:
        """Charges and grants up to `wanted` tokens; fewer, down to 0, at the end of the budget.

        Grants more than `wanted` if further tokens cost nothing. An event with accounts is never refused; a lease
        of its tokens may have fewer than `wanted`, so that it sets little of an account aside.

        Args:
            event: the event of each token. Its cost must not be measured.
            lease: a name for the lease, which makes the call idempotent: a repeated call returns the first grant.
            parts: the number of parts that are served, for an event with accounts.

        Raises:
            LeaseRefused: the count is out of range, a lease with this name has another event or is settled, JSON
                cannot represent the event, or it has accounts and the ledger has none, or none for all `parts`.
            LedgerError: nothing is granted. If the row has reached the disk nevertheless, it stays charged.
        """
        if not 1 <= wanted <= MAX_LEASE:
            raise LeaseRefused(f"a lease holds 1 to {MAX_LEASE} tokens, not {wanted}")
        if event.measured:
            raise LeaseRefused(f"the cost of a token of {event.kind} is known only once it is computed: charge it then")
        _check_recordable(event)
        if event.accounts and (self.terms.horizon is None or not 1 <= (parts or 0) <= (self.terms.parts or 0)):
            raise LeaseRefused(
                f"tokens of {event.kind} need the number of parts that are served and a ledger with accounts, which is "
                f"for {self.terms.parts or 0} parts"
            )
        name = lease or uuid4().hex

        def decide(state: LedgerState) -> Decision[Grant]:
            if name in state.leases:
                return Grant(name, _repeated(state.leases[name], event), state.leases[name].allowances), ()
            if state.stopped:
                return Grant(name, 0), ()
            is_free = not event.accounts and self.filter.is_free(state.charged, event)
            requested = max(wanted, FREE_LEASE) if is_free else wanted
            count = self.filter.affordable(state.charged, event, requested, state.losses)
            if count == 0:
                return Grant(name, 0), ()
            allowances: Grains = ()
            if event.accounts:
                released = state.charged.total() - state.held.total()
                count, allowances = state.accounts.divide(parts or 0, released, self.terms.horizon or 1, count)
            leased = Leased(lease=name, event=event.as_dict(), count=count, allowances=allowances)
            return Grant(name, count, allowances), [leased]

        return self._commit(decide)

    def charge(self, event: Event, tokens: Sequence[Sequence[float]], charge: str) -> int:
        """Charges tokens with measured losses and returns how many of the first tokens may be released.

        A smaller number than len(tokens) means that the budget is used up. If the budget limits the losses themselves,
        the ledger then stops for ever: a later token might cost less, and to grant it would reveal private data.

        Args:
            tokens: the losses of each token: one number that holds for all parts, or one number for each part.
            charge: a name for the charge, which makes the call idempotent: a repeated call returns the same number.

        Raises:
            LeaseRefused: the event is not measured, there are no tokens, or losses are missing or negative.
            LedgerError: no token may be released. If the row has reached the disk nevertheless, it stays charged.
        """
        if not event.measured:
            raise LeaseRefused(f"tokens of {event.kind} are leased, not charged with losses")
        if not 1 <= len(tokens) <= MAX_LEASE or not all(map(are_losses, tokens)):
            raise LeaseRefused("a charge needs at least 1 token, and each token needs losses that are not negative")
        _check_recordable(event)

        def decide(state: LedgerState) -> Decision[int]:
            if charge in state.charges:
                return state.charges[charge], ()
            if state.stopped:
                return 0, ()
            affordable = self.filter.affordable_measured(state.charged, state.losses, event, tokens)
            count = int(min(affordable, state.measured_left))
            records: list[Record] = [_charged(charge, event, tokens[:count])] if count else []
            if count < len(tokens) and self.terms.enforced == "measured":
                records.append(Stopped(charge=charge))
            return count, records

        return self._commit(decide)

    def settle(self, lease: str, used: int, charges: Grains = ()) -> None:
        """Ends a lease and returns its unused tokens to the budget. A repeated call with the same number has no effect.

        A lease of an earlier epoch may be settled too: its client outlives the budget actor, and only the client knows
        the name of its lease.

        Args:
            charges: the grains that the used tokens charged to each part's account, for an event with accounts.

        Raises:
            LeaseRefused: the lease does not exist, more tokens were used than granted, it was settled with another
                number, or the charges are missing or exceed the allowances.
            LedgerError: nothing is returned to the budget.
        """

        def decide(state: LedgerState) -> Decision[None]:
            if lease not in state.leases:
                raise LeaseRefused(f"{self.name} holds no lease {lease!r}")
            before = state.leases[lease]
            if before.settled(used, charges) == before:
                return None, ()
            return None, [Settled(lease=lease, used=used, charges=charges)]

        return self._commit(decide)

    def forfeit(self, count: int | None = None) -> Counter[Event]:
        """Charges tokens that may have been released but are missing from a restored ledger. Returns them by event.

        Charges the difference to what each anchor knows, and at least `count` tokens in all, at the cost of the latest
        event. Charges them even if they exceed the budget. Open leases stay charged in full, because a client that
        returned tokens in the lost rows cannot return them again. If the budget limits measured losses, the ledger
        stops, because the losses of these tokens are unknown. The accounts of all parts of the partition are charged
        the most that these tokens can have cost, and as many more as open leases hold: these may have been settled in
        the lost rows, and their tokens granted again. The anchors then store the end of this chain.

        Raises:
            LeaseRefused: the count is out of range, it is missing and no anchor knows lost rows, or the ledger has
                no charges yet.
        """
        if count is not None and not 1 <= count <= MAX_LEASE:
            raise LeaseRefused(f"1 to {MAX_LEASE} tokens can be forfeited at once, not {count}")
        if count is None and not self._lost:
            raise LeaseRefused("no anchor knows rows that this ledger lacks; give the number of tokens to charge")

        def decide(state: LedgerState) -> Decision[Counter[Event]]:
            missing: Counter[Event] = Counter()
            for lost_end in self._lost.values():
                missing |= lost_end.tokens - state.charged
            if (more := (count or 0) - missing.total()) > 0:
                if state.latest is None:
                    raise LeaseRefused("nothing was ever charged in this ledger, so the cost of a token is unknown")
                missing[state.latest] += more
            records: list[Record] = [
                Settled(lease=name, used=lease.count, charges=lease.held)
                for name, lease in state.leases.items()
                if lease.used is None
            ]
            for event, held in state.held.items():
                if event.accounts and held:
                    missing[event] = max(1, missing[event])
            for event, lost in missing.items():
                charges = self._most_charged(state, event, missing) if event.accounts else ()
                records.append(Forfeited(event=event.as_dict(), count=lost, charges=charges))
            unknown = self.terms.enforced == "measured" and any(event.measured for event in missing)
            if (unknown or any(lost_end.stopped for lost_end in self._lost.values())) and not state.stopped:
                records.append(Stopped(charge=uuid4().hex))
            return missing, records

        return self._commit(decide, forfeits=True)

    def _most_charged(self, state: LedgerState, event: Event, missing: Counter[Event]) -> Grains:
        """Returns the most that the missing tokens of an event, and those that open leases hold, can have charged."""
        if self.terms.parts is None or self.terms.horizon is None:
            raise LeaseRefused(f"tokens of {event.kind} are missing, and the ledger has no accounts")
        released = state.charged.total() - state.held.total()
        last = state.charged.total() + missing.total()
        return state.accounts.largest(
            self.terms.parts, released, last, self.terms.horizon, missing[event] + state.held[event]
        )

    def take_over(self) -> None:
        """Becomes the ledger's writer now.

        Raises:
            Fenced: another writer has the ledger, and this one may not replace it.
        """
        self._commit(lambda state: (None, ()))

    def resume(self) -> None:
        """Becomes the writer again after a restart, if this deployment was the last holder."""
        if self._state is not None and self._state.holders[-1:] == (self._holder,):
            self.take_over()

    def check(self) -> None:
        """Checks that a token could be charged now if the budget allows it, without taking over the ledger.

        Raises:
            LedgerError: the error that a charge would raise, such as Fenced or LedgerUnavailable.
        """
        self._commit(lambda state: (None, ()), writes=False)

    def beat(self) -> None:
        """Writes a heartbeat if this writer has the ledger. The budget actor calls this every few seconds."""
        if self._epoch is not None:
            with self._database.transaction() as connection:
                if silence_s(connection, self._epoch) < math.inf:
                    write_beat(connection, self._epoch)

    def give_up(self) -> None:
        """Gives up the ledger, so that another deployment may take it at once."""
        if self._epoch is not None:
            with self._database.transaction() as connection:
                end_epoch(connection, self._epoch)

    def balance(self) -> Balance:
        """Returns the balance after the last commit that this writer has confirmed."""
        return self._balance

    def _begin(self, database: LedgerDatabase, *, create: bool, identity: str | None) -> LedgerState:
        with database.transaction() as connection:
            if create and schema.create(connection):
                append(connection, [following(None, 0, _opened(self.terms, identity))])
            state = replay(connection)
            if create:
                state = self._signed(connection, state)
            check_same_ledger(state, self.terms, identity)
            self._check_signed(state)
            self._stored = anchored(self._anchors, state.id, create=create)
            self._lost = lost_ends(connection, state.balance(), self._stored)
        return state

    def _signed(self, connection: Connection, state: LedgerState) -> LedgerState:
        """Signs a ledger that this key did not sign yet, after a verification of its whole chain."""
        with suppress(LedgerUnsigned):
            self._check_signed(state)
            return state
        state = replay_whole(connection)
        append(connection, self._signature(state))
        return state

    def _check_signed(self, state: LedgerState) -> None:
        if self._key is not None:
            self._key.check(state.balance())

    def _signature(self, state: LedgerState) -> list[LedgerRow]:
        """Applies a signature of all rows to the state and returns its row; none without a key."""
        return [] if self._key is None else _applied(state, self._key.record(state.head.hash))

    def _commit(
        self, decide: Callable[[LedgerState], Decision[T]], *, writes: bool = True, forfeits: bool = False
    ) -> T:
        """Runs `decide` and commits its records, together with the calls of other waiting threads."""
        if not forfeits:
            self._refuse_lost_rows()
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
        """Commits the waiting calls. The caller holds `_turn`, which is released during the commit."""
        self._busy = True
        calls = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
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
        """Commits these calls in one transaction. If it fails, all of them fail.

        Nothing is charged while an anchor is known to refuse, because it would be charged for nothing.
        """
        try:
            if self._anchor_failed:
                self._anchor()
            unconfirmed = self._state is None
            with self._database.transaction() as connection:
                state = self._caught_up(connection)
                if lost := lost_ends(connection, state.balance(), self._later):
                    raise rolled_back(state.balance(), lost)
                self._later = {}
                takes_over = self._must_take_over(connection, state) and any(call.writes for call in calls)
                self._check_signed(state)
                self._state = None  # `state` now gets rows that are not on disk yet
                written: list[LedgerRow] = []
                if takes_over:
                    written += applied(
                        state,
                        [Epoch(writer=self._writer, holder=self._holder, clients_needed_keys=self._clients_need_keys)],
                    )
                if takes_over or (unconfirmed and state.writer == self._writer):
                    # Rows of a commit that was not confirmed may be on this server and not on its synchronous standby.
                    # Only a transaction that writes waits for the standby.
                    write_beat(connection, state.epoch)
                for call in calls:
                    written += applied(state, call.decide(state))
                if written:
                    written += self._signature(state)
                append(connection, written)
            self._state, self._confirmed, self._balance = state, state.head, state.balance()
            if state.writer == self._writer:
                self._epoch = state.epoch
            # A lost settlement only leaves more charged, so it can wait for the next charge.
            self._anchor_due |= any(row.kind not in (Settled.kind, Signed.kind) for row in written)
            if self._anchor_due and any(call.writes and call.error is None for call in calls):
                self._anchor()
        except BaseException as error:
            for call in calls:
                call.error = error
            if not isinstance(error, Exception):
                raise

    def _anchor(self) -> None:
        """Stores the end of the chain in all anchors. A chain that has charged what it lost replaces theirs.

        Raises:
            LedgerRolledBack: an anchor knows rows of another chain: a writer has charged on a copy of this ledger.
            LedgerUnavailable: an anchor cannot be written.
        """
        self._anchor_failed = True
        try:
            for anchor in self._anchors:
                self._swap(anchor, ChainEnd.of(self._balance))
        except LedgerError as error:
            raise error.of(self.name) from error
        self._anchor_due, self._anchor_failed, self._lost = False, False, {}

    def _swap(self, anchor: Anchor, end: ChainEnd) -> None:
        """Stores an end in an anchor, unless another writer of this ledger has stored a later one."""
        while not is_same(stored := anchor.swap(end, self._stored.get(anchor.name)), end):
            with self._database.transaction() as connection:
                if not is_linked(connection, *sorted((stored.row, end.row))):
                    raise rolled_back(self._balance, {anchor.name: stored})
            self._stored[anchor.name] = stored
            if stored.rows > end.rows:
                self._later[anchor.name] = stored
                return
        self._stored[anchor.name] = end

    def _caught_up(self, connection: Connection) -> LedgerState:
        """Returns the state after every row on disk.

        The kept state may lack rows of other writers, and own rows whose commit succeeded without a confirmation.
        """
        state, self._state = self._state, None
        if state is None:
            state = replay(connection)
            continues = is_linked(
                connection, (self._confirmed.seq, self._confirmed.hash), (state.head.seq, state.head.hash)
            )
        else:
            recent = rows(connection, since=self._confirmed.seq)
            continues = next(recent, None) == self._confirmed
            for row in verified(recent, self._confirmed) if continues else ():
                state.apply(row)
        if not continues:
            raise LedgerRolledBack(
                f"row {self._confirmed.seq} is gone or has changed: the ledger was replaced while in use. Put it back; "
                "if it is lost, stop the service and run `privmix ledger forfeit`"
            )
        # A commit that was not confirmed has charged, and a repeated call gets its grant without another charge.
        self._anchor_due |= state.head != self._confirmed
        self._state, self._confirmed = state, state.head
        return state

    def _must_take_over(self, connection: Connection, state: LedgerState) -> bool:
        """Returns whether this writer must begin an epoch before it writes.

        Raises:
            Fenced: another writer has the ledger, and this one may not take it.
        """
        if state.writer == self._writer:
            return False
        former = "a writer" if self._epoch is None else f"the writer of epoch {self._epoch}"
        replaced = f"{former} of this deployment was replaced by that of epoch {state.epoch}"
        last = state.holders[-1] if state.holders else None
        if self._holder is None or self._holder == last:
            if self._epoch is not None:  # by its own successor
                raise Fenced(f"{replaced} and must not write again")
            return True
        if self._holder in state.holders and silence_s(connection, state.epoch) < PATIENCE_S:
            raise Fenced(f"{replaced}; it continues once the other deployment has ended or sends no heartbeats")
        return True


class _Call:
    """Holds a decision that waits for the next transaction, and then its result or error."""

    def __init__(self, decide: Callable[[LedgerState], Decision[Any]], writes: bool) -> None:
        self.writes = writes
        self._decide = decide
        self._result: Any = None
        self.error: BaseException | None = None
        self.done = False

    def decide(self, state: LedgerState) -> Sequence[Record]:
        """Returns the records that the decision adds. A refusal adds none and does not affect other calls."""
        try:
            self._result, records = self._decide(state)
        except ValueError as error:  # includes LeaseRefused
            self.error = error
            return ()
        return records

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self._result


def applied(state: LedgerState, records: Sequence[Record]) -> list[LedgerRow]:
    """Applies records to the state and returns their rows, followed by a checkpoint if one is due."""
    written: list[LedgerRow] = []
    for record in records:
        written += _applied(state, record)
    if records and state.head.seq - state.checkpointed >= CHECKPOINT_ROWS:
        written += _applied(state, state.checkpoint())
    return written


def _applied(state: LedgerState, record: Record) -> list[LedgerRow]:
    row = following(state.head, state.epoch + isinstance(record, Epoch), record)
    state.apply(row)
    return [row]


def _opened(terms: PrivacyBudget, identity: str | None) -> Opened:
    stop_after = None if terms.stop_within is None else uniform_below(terms.stop_within)
    return Opened(id=identity or uuid4().hex, terms=terms, stop_after=stop_after)


def _charged(charge: str, event: Event, tokens: Sequence[Sequence[float]]) -> Charged:
    total = reduce(Losses.plus, tokens, NO_LOSSES)
    losses = total.parts or (total.alike,)
    return Charged(charge=charge, event=event.as_dict(), count=len(tokens), losses=losses)


def _check_recordable(event: Event) -> None:
    if from_json(event.to_json()) != event:
        raise LeaseRefused(f"{event} changes when JSON stores it, so the ledger could not be read again")


def _repeated(lease: Lease, event: Event) -> int:
    if lease.event != event or lease.used is not None:
        raise LeaseRefused("a lease with this name was granted before, for another event, or is already settled")
    return lease.count


def charge_release(ledger: str, event: Event, subject: str, budget: float, delta: float) -> None:
    """Charges one release that serves without limit, such as a head. Creates the ledger if it does not exist.

    Args:
        ledger: a path or URL.
        event: the cost of the release, an event that is charged `once`.
        subject: what the ledger is for; it takes the place of an ensemble's id.
        budget, delta: the limit of all releases about this subject, which the existing ledger must have.

    Raises:
        WorkError: the budget does not suffice. Nothing may be released.
        LedgerError: the ledger cannot be used, or has another budget.
    """
    terms = PrivacyBudget(
        ensemble=subject, epsilon=budget, delta=delta, order=_RELEASES_ORDER, adjacency=event.adjacency
    )
    if Ledger.create(ledger, terms).lease(event, 1).count == 0:
        raise WorkError(f"ledger {ledger}: its budget does not suffice for another release; nothing was released")
