"""Claim: a ledger that lost rows grants nothing until the tokens of these rows are charged, and then exactly them."""

import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from privmix.budget.anchor import Anchor, ChainEnd, DirectoryAnchor, anchor_at, anchored
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import check, read
from privmix.budget.receipt import Receipt, ReceiptAnchor, anchors_of, begin, verified_ledger_id
from privmix.foundation.errors import (
    LeaseRefused,
    LedgerForeign,
    LedgerMismatch,
    LedgerRolledBack,
    LedgerUnavailable,
    LedgerUnknown,
)
from privmix.privacy.protocols.submix import SubMixEvent
from tests.postgresql import Server
from tests.services.budget.events import COARSE

MEASURED = SubMixEvent(parts=8, order=8.0, beta=0.01)

Snapshot = Callable[[], Callable[[], None]]


@pytest.fixture
def snapshot(place: str, request: pytest.FixtureRequest) -> Snapshot:
    """Copies the database; the returned function puts the copy back, as an operator or a failover does."""

    def copy() -> Callable[[], None]:
        if "://" not in place:
            kept = Path(place).with_suffix(".kept")
            shutil.copy(place, kept)  # every writer has closed the file, so it contains the write-ahead log
            return lambda: _restore_file(kept, Path(place))
        server: Server = request.getfixturevalue("postgresql")
        kept_there = server.url(server.copy(place))
        return lambda: server.restore(place, server.copy(kept_there))

    return copy


def _restore_file(kept: Path, place: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{place}{suffix}").unlink(missing_ok=True)
    shutil.copy(kept, place)


def opened(place: str, terms: PrivacyBudget, anchors: tuple[Anchor, ...], *, restored: bool = False) -> Ledger:
    return (Ledger.restore if restored else Ledger.open)(place, terms, anchors=anchors)


def test_a_rolled_back_ledger_is_refused_and_forfeit_charges_what_it_lost(
    place: str, roomy: PrivacyBudget, ensemble: Path, snapshot: Snapshot
) -> None:
    begin(place, roomy, ensemble)
    anchors = anchors_of(ensemble)
    opened(place, roomy, anchors).lease(COARSE, 10)
    restore = snapshot()
    assert opened(place, roomy, anchors).lease(COARSE, 900).count == 900
    restore()
    assert read(place).charged == {COARSE: 10}, "the copy is an intact chain"
    with pytest.raises(LedgerRolledBack, match="privmix ledger forfeit"):
        opened(place, roomy, anchors)
    for verify in (verified_ledger_id, begin):
        with pytest.raises(LedgerRolledBack):
            verify(place, roomy, ensemble)
    assert opened(place, roomy, anchors, restored=True).forfeit() == {COARSE: 900}
    assert read(place).charged == {COARSE: 910}
    verified_ledger_id(place, roomy, ensemble)
    assert opened(place, roomy, anchors).lease(COARSE, 1).count == 1
    restore()
    with pytest.raises(LedgerRolledBack):
        opened(place, roomy, anchors)
    with pytest.raises(LedgerRolledBack):
        Ledger.open(place, roomy, anchors=anchors, holder="a service, which takes over with its first write")
    with pytest.raises(LedgerRolledBack):
        check(place, roomy, anchors=anchors)
    restored = opened(place, roomy, anchors, restored=True)
    assert restored.forfeit(1000) == {COARSE: 1000}, "at least this number, and the 901 that the anchor knows"
    check(place, roomy, anchors=anchors)
    assert (end := anchors[0].read(read(place).id)) is not None
    assert (end.head, end.tokens) == (read(place).head, {COARSE: 1010})


def test_forfeit_is_refused_where_the_anchor_moved_meanwhile(
    tmp_path: Path, roomy: PrivacyBudget, second: str, path: Path
) -> None:
    """The writer whose rows were thought lost lives on."""
    anchors, copy = (anchor_at(second),), tmp_path / "copy.db"
    alive = Ledger.create(path, roomy, anchors=anchors)
    alive.lease(COARSE, 1)
    shutil.copy(path, copy)
    alive.lease(COARSE, 5)
    restored = opened(str(copy), roomy, anchors, restored=True)
    alive.lease(COARSE, 5)
    with pytest.raises(LedgerRolledBack):
        restored.forfeit()
    assert opened(str(copy), roomy, anchors, restored=True).forfeit() == {COARSE: 5}, "the others are charged already"
    with pytest.raises(LedgerRolledBack):
        alive.lease(COARSE, 1)
    assert opened(str(copy), roomy, anchors).lease(COARSE, 1).count == 1


def test_tokens_in_flight_are_charged_exactly(path: Path, tmp_path: Path, roomy: PrivacyBudget, second: str) -> None:
    """64 streams hold leases at the copy and after it. The counters of the last scrape would miss 256 tokens."""
    anchors, kept = (anchor_at(second),), tmp_path / "kept"
    ledger = Ledger.create(path, roomy, anchors=anchors)
    held = [ledger.lease(COARSE, 32).lease for _ in range(4)]
    shutil.copy(path, kept)
    for lease in held:
        ledger.settle(lease, 20)
    released = 4 * 20 + sum(ledger.lease(COARSE, 64).count for _ in range(4))
    shutil.copy(kept, path)
    restored = opened(str(path), roomy, anchors, restored=True)
    restored.forfeit()
    assert read(path).charged == {COARSE: released}
    for lease in held:
        with pytest.raises(LeaseRefused):
            restored.settle(lease, 0)
    assert read(path).charged == {COARSE: released}, "nothing that was released can be returned"


@pytest.mark.parametrize("writer_ends", [False, True])
def test_nothing_is_granted_while_an_anchor_cannot_be_written(
    path: Path, tmp_path: Path, roomy: PrivacyBudget, second: str, writer_ends: bool
) -> None:
    """Later, the writer or its successor anchors the grant that could not be anchored."""
    anchors, away = (anchor_at(second),), tmp_path / "away"
    ledger = Ledger.create(path, roomy, anchors=anchors, holder="only")
    ledger.take_over()
    Path(second).rename(away)
    for _ in range(2):  # a repeated call must not get the grant of the first without an anchor
        with pytest.raises(LedgerUnavailable, match="its anchor"):
            ledger.lease(COARSE, 10, "mine")
    away.rename(second)
    if writer_ends:
        ledger = Ledger.open(path, roomy, anchors=anchors, holder="only")
    assert ledger.lease(COARSE, 10, "mine").count == 10
    assert (end := anchors[0].read(read(path).id)) is not None
    assert (end.rows, end.tokens) == (read(path).rows, {COARSE: 10})


def test_a_missing_anchor_is_refused_until_it_is_recorded(
    path: Path, tmp_path: Path, roomy: PrivacyBudget, ensemble: Path, second: str
) -> None:
    begun = begin(str(path), roomy, ensemble)
    with pytest.raises(LedgerUnknown, match="privmix ledger init"):
        verified_ledger_id(str(path), roomy, ensemble, anchor=second)
    begin(str(path), roomy, ensemble, anchor=second)
    assert verified_ledger_id(str(path), roomy, ensemble, anchor=second) == begun.ledger
    with pytest.raises(LedgerUnknown):
        (tmp_path / "new").mkdir()
        Ledger.open(path, roomy, anchors=(DirectoryAnchor(tmp_path / "new"),))


def test_an_anchor_of_another_ledger_is_refused(path: Path, roomy: PrivacyBudget, second: str) -> None:
    anchors = (anchor_at(second),)
    stored = Path(second) / f"{Ledger.create(path, roomy, anchors=anchors).balance().id}.json"
    stored.write_text(ChainEnd(ledger="other", rows=1, head="0" * 64).model_dump_json())
    with pytest.raises(LedgerMismatch, match="belongs to the ledger other"):
        opened(str(path), roomy, anchors)
    stored.write_text("{}")
    with pytest.raises(LedgerForeign, match="not an anchor"):
        opened(str(path), roomy, anchors)


@pytest.fixture(params=["receipt", "directory"])
def anchor(request: pytest.FixtureRequest, ensemble: Path, second: str) -> Anchor:
    if request.param == "receipt":
        Receipt(ledger="mine").save(ensemble)
        return ReceiptAnchor(ensemble)
    return anchor_at(second)


def end_of(rows: int, chain: str = "a") -> ChainEnd:
    return ChainEnd(ledger="mine", rows=rows, head=f"{chain}{rows}" * 32)


def test_an_end_replaces_only_the_end_that_its_writer_knows(anchor: Anchor) -> None:
    first, second, other = end_of(1), end_of(2), end_of(2, "b")
    assert anchor.read("mine") is None
    assert anchor.swap(first, None) == anchor.read("mine") == first
    assert anchor.swap(second, None) == anchor.read("mine") == first
    assert anchor.swap(second, first) == anchor.read("mine") == second
    assert anchor.swap(other, first) == anchor.read("mine") == second, "one with as many rows does not count as later"
    assert anchor.swap(end_of(9, "b"), first) == anchor.read("mine") == second, "nor one with more"
    assert anchor.swap(first, second) == anchor.read("mine") == first, "forfeit returns to a shorter chain"
    for rows in range(2, 8):
        assert anchor.swap(end_of(rows), end_of(rows - 1)) == anchor.read("mine") == end_of(rows)


@pytest.mark.parametrize("held", [False, True])
def test_of_many_writers_at_once_one_replaces_an_end(anchor: Anchor, held: bool) -> None:
    before = end_of(1) if held else None
    assert anchor.read("mine") is None
    if before:
        anchor.swap(before, None)
    chains = "cdefghij"
    with ThreadPoolExecutor(len(chains)) as pool:
        stored = list(pool.map(lambda chain: anchor.swap(end_of(2, chain), before), chains))
    assert len({end.head for end in stored}) == 1
    assert anchor.read("mine") == stored[0]


def test_an_end_that_is_gone_is_not_written_again(anchor: Anchor) -> None:
    assert anchor.read("mine") is None
    with pytest.raises(LedgerUnavailable, match="its anchor"):
        anchor.swap(end_of(2), end_of(1))


def test_a_lost_stop_is_kept(path: Path, tmp_path: Path, measured: PrivacyBudget, second: str) -> None:
    anchors, kept = (anchor_at(second),), tmp_path / "kept"
    ledger = Ledger.create(path, measured, anchors=anchors)
    ledger.lease(COARSE, 1)
    shutil.copy(path, kept)
    assert ledger.charge(MEASURED, [[1e9]], "too much") == 0
    assert ledger.balance().stopped
    shutil.copy(kept, path)
    opened(str(path), measured, anchors, restored=True).forfeit()
    assert read(path).stopped


def test_forfeit_without_a_number_needs_an_anchor_that_knows_more(path: Path, roomy: PrivacyBudget) -> None:
    ledger = Ledger.create(path, roomy)
    ledger.lease(COARSE, 1)
    with pytest.raises(LeaseRefused, match="give the number of tokens"):
        ledger.forfeit()
    assert ledger.forfeit(3) == Counter({COARSE: 3})


def test_the_place_of_an_anchor_must_be_known(tmp_path: Path, ensemble: Path) -> None:
    with pytest.raises(LedgerForeign, match=r"budget\.anchor must be a directory"):
        anchor_at("s3://bucket")
    assert anchors_of(ensemble) == ()
    with pytest.raises(LedgerUnavailable, match="there is no such directory"):
        anchor_at(str(tmp_path / "none")).read("mine")
    assert ReceiptAnchor(ensemble).read("mine") is None


def test_a_fixed_end_is_looked_for_unless_another_anchor_has_a_later_one(ensemble: Path, second: str) -> None:
    later, fixed = anchor_at(second), ReceiptAnchor(ensemble, fixed=True)
    Receipt(ledger="mine", end=end_of(5)).save(ensemble)
    for rows, known in ((4, {fixed.name: end_of(5), later.name: end_of(4)}), (6, {later.name: end_of(6)})):
        later.swap(end_of(rows), later.read("mine"))
        assert anchored((fixed, later), "mine", create=False) == known
