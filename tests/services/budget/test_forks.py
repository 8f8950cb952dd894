"""Claim: in every interleaving of writers on copies of one ledger, its anchor names one chain, with all grants in it.

The schedules run the real writers: on a volume, on its clone, which a promoted standby or a second machine writes, and
one that is paused between its commit and its anchor and comes back later.
"""

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from privmix.budget.anchor import Anchor, ChainEnd, is_same, present
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import every_row
from privmix.foundation.errors import LeaseRefused, LedgerError, LedgerRolledBack
from tests.services.budget.events import COARSE

TOKENS = 4
PATIENCE_S = 60.0


class Store:
    """What all writers' anchors share: one end, which is replaced in one step."""

    def __init__(self) -> None:
        self.end: ChainEnd | None = None
        self.lock = threading.Lock()


class Gate(Anchor):
    """An anchor before which its writer can be paused."""

    name = "gate"

    def __init__(self, store: Store) -> None:
        self._store = store
        self.pauses = False
        self.reached, self.resumed = threading.Event(), threading.Event()

    def read(self, ledger: str) -> ChainEnd | None:
        return self._store.end

    def swap(self, end: ChainEnd, before: ChainEnd | None) -> ChainEnd:
        if self.pauses:
            self.pauses = False
            self.reached.set()
            assert self.resumed.wait(PATIENCE_S)
        with self._store.lock:
            if is_same(self._store.end, before):
                self._store.end = end
            return present(self._store.end, self.name)


class Writer:
    """A process with one ledger."""

    def __init__(self, place: Path, terms: PrivacyBudget, store: Store, holder: str, *, restored: bool = False) -> None:
        self.gate = Gate(store)
        begin = Ledger.restore if restored else Ledger.open
        self.ledger = begin(place, terms, anchors=(self.gate,), holder=None if restored else holder)
        self._thread: threading.Thread | None = None

    def lease(self, granted: dict[str, int], name: str) -> None:
        with suppress(LedgerError):
            granted[name] = self.ledger.lease(COARSE, TOKENS, name).count

    def pause(self, granted: dict[str, int], name: str) -> None:
        """Leases, and stops after the commit."""
        self.gate.pauses = True
        self._thread = threading.Thread(target=lambda: self._run(granted, name), daemon=True)
        self._thread.start()
        assert self.gate.reached.wait(PATIENCE_S)

    def resume(self) -> None:
        self.gate.resumed.set()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()

    def _run(self, granted: dict[str, int], name: str) -> None:
        self.lease(granted, name)
        self.gate.reached.set()  # a writer that is refused before its anchor does not stop there


class World:
    """A volume, its clones and the anchor of one ledger; `granted` holds the tokens of each lease that a client got."""

    def __init__(self, folder: Path, template: Path, terms: PrivacyBudget, end: ChainEnd) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self.volumes = [Path(shutil.copy(template, self._folder / "0.db"))]
        self.terms, self.store = terms, Store()
        self.store.end = end
        self.granted: dict[str, int] = {}
        self.forfeited = False
        self._number = 0
        self.here = self._opened(0, "here")
        self.there: Writer | None = None
        self.paused: Writer | None = None

    def grant_here(self) -> None:
        if self.here is not None:
            self.here.lease(self.granted, self._name())

    def grant_there(self) -> None:
        if self.there is not None:
            self.there.lease(self.granted, self._name())

    def pause(self) -> None:
        """The writer of the first volume stops, and its successor on the same volume takes over."""
        if self.here is not None:
            self.paused = self.here
            self.paused.pause(self.granted, self._name())
            self.here = self._opened(0, "here")

    def resume(self) -> None:
        if self.paused is not None:
            self.paused.resume()
            self.paused = None

    def clone(self) -> None:
        """A writer begins on a copy of the first volume."""
        self.volumes.append(Path(shutil.copy(self.volumes[0], self._folder / f"{len(self.volumes)}.db")))
        self.there = self._opened(-1, "there")

    def restore(self) -> None:
        """An operator charges what the last clone lacks, while the writer of the first volume goes on."""
        self.there = self._opened(-1, "there", restored=True)
        try:
            if self.there is not None:
                self.there.ledger.forfeit()
                self.forfeited = True
        except (LedgerError, LeaseRefused):  # another writer was first, or nothing is lost
            self.there = None

    def check(self) -> None:
        end = self.store.end
        assert end is not None
        assert sum(self.granted.values()) <= end.tokens.total() <= 208, "all tokens are in the anchored chain"
        chains = [chain for volume in self.volumes if (chain := _chain(volume, end)) is not None]
        assert chains, "a volume has the anchored chain"
        if not self.forfeited:
            assert all(self.granted.keys() <= chain for chain in chains), "each grant is in that chain"

    def _opened(self, volume: int, holder: str, *, restored: bool = False) -> Writer | None:
        try:
            return Writer(self.volumes[volume], self.terms, self.store, holder, restored=restored)
        except LedgerRolledBack:
            return None

    def _name(self) -> str:
        self._number += 1
        return f"lease {self._number}"


def _chain(volume: Path, end: ChainEnd) -> set[str] | None:
    """Returns the names of the leases up to an anchored end; None if the volume's chain does not contain that end."""
    with LedgerDatabase(volume, "read").transaction() as connection:
        if end.row not in [(row.seq, row.hash) for row in every_row(connection)]:
            return None
        return {json.loads(row.body)["lease"] for row in every_row(connection) if row.kind == "lease"}


ACTIONS = ("grant_here", "grant_there", "clone", "pause", "resume", "restore")


def schedules(length: int) -> Iterator[tuple[str, ...]]:
    """Yields all schedules that clone once or more, without actions that have no effect."""
    for schedule in product(ACTIONS, repeat=length):
        cloned, paused, useful = False, False, True
        for action in schedule:
            useful &= cloned or action not in ("grant_there", "restore")
            useful &= not paused if action == "pause" else paused if action == "resume" else True
            cloned |= action == "clone"
            paused = action == "pause" or (paused and action != "resume")
        if useful and cloned and schedule[-1].startswith("grant"):
            yield schedule


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, terms: PrivacyBudget) -> tuple[Path, ChainEnd]:
    path = tmp_path_factory.mktemp("template") / "ledger.db"
    return path, ChainEnd.of(Ledger.create(path, terms, holder="here").balance())


def explore(folder: Path, template: tuple[Path, ChainEnd], terms: PrivacyBudget, length: int) -> int:
    """Runs all schedules; returns in how many of them a writer was refused."""
    path, end = template
    refused = 0
    for schedule in schedules(length):
        world = World(folder, path, terms, end)
        try:
            for action in schedule:
                getattr(world, action)()
            world.resume()
            world.check()
        except AssertionError as error:
            raise AssertionError(f"{' '.join(schedule)}: {error}") from error
        refused += sum(name.startswith("grant") for name in schedule) > len(world.granted)
    return refused


@pytest.mark.parametrize("length", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_each_grant_is_in_the_one_chain_that_the_anchor_names(
    tmp_path: Path, template: tuple[Path, ChainEnd], terms: PrivacyBudget, length: int
) -> None:
    assert explore(tmp_path, template, terms, length) > 0, "some writer found the other's end"


def test_an_anchor_that_compares_numbers_of_rows_is_found(
    tmp_path: Path, template: tuple[Path, ChainEnd], terms: PrivacyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that let two writers spend one budget twice."""

    def later(gate: Gate, end: ChainEnd, before: ChainEnd | None) -> ChainEnd:
        stored = gate.read(end.ledger)
        if stored is None or stored.rows <= end.rows:
            gate._store.end = end
        return end

    monkeypatch.setattr(Gate, "swap", later)
    with pytest.raises(AssertionError, match=r"clone .*: (all tokens are|each grant is) in th"):
        explore(tmp_path, template, terms, 3)
