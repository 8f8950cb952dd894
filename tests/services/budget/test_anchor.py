"""Claim: a ledger that lost rows grants nothing until the tokens of these rows are charged, and then exactly them."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import make_url

from services.budget.anchor import Anchor, ChainEnd, DatabaseAnchor, DirectoryAnchor, ObjectAnchor, anchor_at
from services.budget.ledger import Ledger
from services.budget.privacy_budget import PrivacyBudget
from services.budget.reader import check, read
from services.budget.receipt import ReceiptAnchor, anchors_of, begin, known
from services.errors import (
    LeaseRefused,
    LedgerForeign,
    LedgerMismatch,
    LedgerRolledBack,
    LedgerUnavailable,
    LedgerUnknown,
)
from services.privacy.protocols.submix import SubMixEvent
from tests.postgresql import Server
from tests.services.budget.events import COARSE, FINE

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
        name, kept_name = make_url(place).database, f"kept_{uuid4().hex}"
        _recreate(server, kept_name, str(name))
        return lambda: _recreate(server, str(name), kept_name)

    return copy


def _restore_file(kept: Path, place: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{place}{suffix}").unlink(missing_ok=True)
    shutil.copy(kept, place)


def _recreate(server: Server, name: str, template: str) -> None:
    with server.connect() as connection:
        for database in (name, template):
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (database,))
        connection.execute(psycopg.sql.SQL("DROP DATABASE IF EXISTS {}").format(psycopg.sql.Identifier(name)))
        connection.execute(
            psycopg.sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                psycopg.sql.Identifier(name), psycopg.sql.Identifier(template)
            )
        )


@pytest.fixture
def ensemble(tmp_path: Path) -> Path:
    directory = tmp_path / "ensemble"
    directory.mkdir()
    return directory


@pytest.fixture(params=["directory", "objects", "sqlite", "postgresql"])
def second(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for the second anchor."""
    match request.param:
        case "directory":
            (tmp_path / "anchors").mkdir()
            return str(tmp_path / "anchors")
        case "objects":
            return f"memory://{uuid4().hex}/anchors"
        case "sqlite":
            return f"sqlite:///{tmp_path}/anchors.db"
    server: Server = request.getfixturevalue("postgresql")
    return server.database()


def opened(place: str, terms: PrivacyBudget, anchors: tuple[Anchor, ...], *, restored: bool = False) -> Ledger:
    return Ledger(place, terms, create=False, anchors=anchors, restored=restored)


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
    for verify in (known, begin):
        with pytest.raises(LedgerRolledBack):
            verify(place, roomy, ensemble)
    assert opened(place, roomy, anchors, restored=True).forfeit() == {COARSE: 900}
    assert read(place).charged == {COARSE: 910}
    known(place, roomy, ensemble)
    assert opened(place, roomy, anchors).lease(COARSE, 1).count == 1
    restore()
    with pytest.raises(LedgerRolledBack):
        opened(place, roomy, anchors)
    assert opened(place, roomy, anchors, restored=True).forfeit() == {COARSE: 901}, "the second restoration"


def test_each_kind_of_anchor_detects_the_roll_back(
    tmp_path: Path, roomy: PrivacyBudget, second: str, path: Path
) -> None:
    place, kept, anchors = str(path), tmp_path / "kept", (anchor_at(second),)
    Ledger(place, roomy, anchors=anchors).lease(COARSE, 10)
    shutil.copy(place, kept)
    opened(place, roomy, anchors).lease(FINE, 5)
    shutil.copy(kept, place)
    with pytest.raises(LedgerRolledBack):
        opened(place, roomy, anchors)
    with pytest.raises(LedgerRolledBack):
        check(place, roomy, anchors=anchors)
    assert opened(place, roomy, anchors, restored=True).forfeit(7) == {FINE: 5, COARSE: 2}, "at least 7 tokens"
    check(place, roomy, anchors=anchors)
    assert (end := anchors[0].read(read(place).id)) is not None
    assert (end.head, end.tokens) == (read(place).head, read(place).charged)


def test_tokens_in_flight_are_charged_exactly(path: Path, tmp_path: Path, roomy: PrivacyBudget) -> None:
    """64 streams hold leases at the copy and after it. The counters of the last scrape would miss 256 tokens."""
    (tmp_path / "anchors").mkdir()
    anchors, kept = (DirectoryAnchor(tmp_path / "anchors"),), tmp_path / "kept"
    ledger = Ledger(path, roomy, anchors=anchors)
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


def test_a_writer_whose_database_loses_rows_stops_and_so_does_its_successor(
    place: str, roomy: PrivacyBudget, ensemble: Path, snapshot: Snapshot
) -> None:
    begin(place, roomy, ensemble)
    anchors = anchors_of(ensemble)
    restore = snapshot()
    writer = opened(place, roomy, anchors)
    writer.lease(COARSE, 10)
    restore()
    with pytest.raises(LedgerRolledBack):
        writer.lease(COARSE, 10)
    with pytest.raises(LedgerRolledBack):
        opened(place, roomy, anchors)


def test_nothing_is_granted_while_an_anchor_cannot_be_written(path: Path, tmp_path: Path, roomy: PrivacyBudget) -> None:
    places = tmp_path / "anchors"
    places.mkdir()
    ledger = Ledger(path, roomy, anchors=(DirectoryAnchor(places),))
    places.rename(tmp_path / "away")
    for _ in range(2):  # a repeated call must not get the grant of the first without an anchor
        with pytest.raises(LedgerUnavailable, match="its anchor"):
            ledger.lease(COARSE, 10, "mine")
    (tmp_path / "away").rename(places)
    assert ledger.lease(COARSE, 10, "mine").count == 10
    assert read(path).charged == {COARSE: 10}
    assert (end := DirectoryAnchor(places).read(read(path).id)) is not None
    assert end.rows == read(path).rows


def test_a_new_writer_anchors_a_grant_that_the_last_one_could_not(
    path: Path, tmp_path: Path, roomy: PrivacyBudget
) -> None:
    places = tmp_path / "anchors"
    places.mkdir()
    anchors = (DirectoryAnchor(places),)
    ledger = Ledger(path, roomy, anchors=anchors, holder="only")
    ledger.take_over()
    places.rename(tmp_path / "away")
    with pytest.raises(LedgerUnavailable):
        ledger.lease(COARSE, 10, "mine")
    (tmp_path / "away").rename(places)
    successor = Ledger(path, roomy, create=False, anchors=anchors, holder="only")
    assert successor.lease(COARSE, 10, "mine").count == 10
    assert (end := anchors[0].read(read(path).id)) is not None
    assert end.tokens == {COARSE: 10}


def test_a_missing_anchor_is_refused_until_it_is_recorded(
    path: Path, tmp_path: Path, roomy: PrivacyBudget, ensemble: Path
) -> None:
    second = tmp_path / "anchors"
    second.mkdir()
    begun = begin(str(path), roomy, ensemble)
    with pytest.raises(LedgerUnknown, match="privmix ledger init"):
        known(str(path), roomy, ensemble, anchor=str(second))
    begin(str(path), roomy, ensemble, anchor=str(second))
    assert known(str(path), roomy, ensemble, anchor=str(second)) == begun.ledger
    with pytest.raises(LedgerUnknown):
        Ledger(path, roomy, create=False, anchors=(ObjectAnchor(f"memory://{uuid4().hex}"),))


def test_an_anchor_of_another_ledger_is_refused(path: Path, tmp_path: Path, roomy: PrivacyBudget) -> None:
    (tmp_path / "anchors").mkdir()
    anchor = DirectoryAnchor(tmp_path / "anchors")
    identity = Ledger(path, roomy, anchors=(anchor,)).balance().id
    other = ChainEnd(ledger="other", rows=1, head="0" * 64)
    (anchor.path / f"{identity}.json").write_text(other.model_dump_json())
    with pytest.raises(LedgerMismatch, match="belongs to the ledger other"):
        opened(str(path), roomy, (anchor,))
    (anchor.path / f"{identity}.json").write_text("{}")
    with pytest.raises(LedgerForeign, match="not an anchor"):
        opened(str(path), roomy, (anchor,))


def test_an_older_write_does_not_replace_a_later_end(second: str) -> None:
    anchor = anchor_at(second)
    later, older = (ChainEnd(ledger="mine", rows=rows, head=f"{rows}" * 64) for rows in (5, 3))
    assert anchor.read("mine") is None
    anchor.write(later)
    anchor.write(older)
    assert anchor.read("mine") == later
    anchor.write(older, rewound=True)
    assert anchor.read("mine") == older
    assert anchor.read("another") is None


def test_a_lost_stop_is_kept(path: Path, tmp_path: Path, terms: PrivacyBudget) -> None:
    (tmp_path / "anchors").mkdir()
    anchors, kept = (DirectoryAnchor(tmp_path / "anchors"),), tmp_path / "kept"
    measured = terms.model_copy(update={"enforced": "measured"})
    ledger = Ledger(path, measured, anchors=anchors)
    ledger.lease(COARSE, 1)
    shutil.copy(path, kept)
    assert ledger.charge(MEASURED, [[1e9]], "too much") == 0
    assert ledger.balance().stopped
    shutil.copy(kept, path)
    opened(str(path), measured, anchors, restored=True).forfeit()
    assert read(path).stopped


def test_forfeit_without_a_number_needs_an_anchor_that_knows_more(path: Path, roomy: PrivacyBudget) -> None:
    ledger = Ledger(path, roomy)
    ledger.lease(COARSE, 1)
    with pytest.raises(LeaseRefused, match="give the number of tokens"):
        ledger.forfeit()
    assert ledger.forfeit(3) == Counter({COARSE: 3})


def test_the_place_of_an_anchor_must_be_known(tmp_path: Path, ensemble: Path) -> None:
    with pytest.raises(LedgerForeign, match="a directory, an object store or a database"):
        anchor_at("nowhere://bucket")
    assert anchors_of(ensemble) == ()
    assert isinstance(anchor_at(f"sqlite:///{tmp_path}/a.db"), DatabaseAnchor)
    with pytest.raises(LedgerUnavailable, match="there is no such directory"):
        anchor_at(str(tmp_path / "none")).read("mine")
    assert ReceiptAnchor(ensemble).read("mine") is None
