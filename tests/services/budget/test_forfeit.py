"""Claim: whatever a restored ledger lost, `forfeit` charges each account at least what its part can have paid."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from privmix.budget.accounts import Grains
from privmix.budget.anchor import Anchor, DirectoryAnchor
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.foundation.errors import LeaseRefused
from privmix.privacy.protocols.individual import WHOLE, IndividualSettings

PARTS, FEW = 8, 3
HORIZON = 64
SETTINGS = IndividualSettings(tokens=HORIZON)
EVENT = SETTINGS.plan(PARTS).event


@pytest.fixture(scope="module")
def terms() -> PrivacyBudget:
    return PrivacyBudget.of("clinic", SETTINGS, SETTINGS.plan(FEW), partition="salt", parts=PARTS)


class World:
    """Spends a ledger's accounts as fast as they allow, restores older copies of it, and counts what parts really paid.

    Attributes:
        paid: the grains that each part's tokens can have charged, in all chains that the ledger ever had.
    """

    def __init__(self, folder: Path, terms: PrivacyBudget, anchors: Sequence[Anchor]) -> None:
        self._folder, self._terms, self._anchors = folder, terms, anchors
        self.ledger = Ledger.create(folder / "ledger.db", terms, anchors=anchors)
        self.paid = [0] * PARTS
        self._open: dict[str, tuple[int, Grains]] = {}
        self._copies = 0

    def lease(self, wanted: int, parts: int) -> str:
        grant = self.ledger.lease(EVENT, wanted, None, parts)
        self._open[grant.lease] = grant.count, grant.allowances
        return grant.lease

    def settle(self, lease: str, used: int | None = None) -> int:
        """Releases the first tokens of a lease, by default all, each of which charges the most that it may."""
        count, allowances = self._open.pop(lease)
        used = count if used is None else min(used, count)
        charges = tuple(used * own for own in allowances)
        self._pay(charges)
        self.ledger.settle(lease, used, charges)
        return used

    def spend(self, parts: int, tokens: int) -> None:
        while tokens > 0:
            tokens -= self.settle(self.lease(tokens, parts))

    def copy(self) -> Path:
        self._copies += 1
        return Path(shutil.copy(self._folder / "ledger.db", self._folder / f"{self._copies}.db"))

    def restore(self, copy: Path) -> None:
        """Puts a copy back and forfeits. The tokens of leases that were open may have been released."""
        for count, allowances in self._open.values():
            self._pay(tuple(count * own for own in allowances))
        self._open = {}
        shutil.copy(copy, self._folder / "ledger.db")
        place = self._folder / "ledger.db"
        Ledger.restore(place, self._terms, anchors=self._anchors).forfeit()
        self.ledger = Ledger.open(place, self._terms, anchors=self._anchors)

    def check(self) -> None:
        accounts = self.ledger.balance().accounts
        for part, paid in enumerate(self.paid):
            entered = accounts.charged[part] if part < len(accounts.charged) else 0
            held = sum(count * own[part] for count, own in self._open.values() if part < len(own))
            assert paid <= entered, f"part {part} paid {paid / WHOLE} accounts; the ledger knows {entered / WHOLE}"
            assert paid + held <= WHOLE

    def _pay(self, charges: Grains) -> None:
        for part, own in enumerate(charges):
            self.paid[part] += own


@pytest.fixture
def world(tmp_path: Path, terms: PrivacyBudget) -> World:
    (tmp_path / "anchors").mkdir()
    return World(tmp_path, terms, (DirectoryAnchor(tmp_path / "anchors"),))


@pytest.mark.parametrize(("before", "after"), [(0, PARTS), (FEW, PARTS), (PARTS, PARTS), (PARTS, FEW)])
def test_each_part_of_the_partition_is_charged(world: World, before: int, after: int) -> None:
    """The copy has no entry of a part that was not served before it was made. It is restored twice."""
    if before:
        world.spend(before, 1)
    copy = world.copy()
    for _ in range(2):
        world.spend(after, HORIZON)
        world.restore(copy)
        world.check()
        assert len(world.ledger.balance().accounts.charged) == PARTS
    world.spend(after, HORIZON)
    world.check()


@pytest.mark.parametrize("seed", range(8))
def test_no_part_pays_more_than_its_account_in_all_chains_together(world: World, seed: int) -> None:
    chance = random.Random(seed)
    copies, leases = [world.copy()], []
    for _ in range(30):
        match chance.choice(["lease", "lease", "settle", "settle", "spend", "copy", "restore"]):
            case "lease":
                leases.append(world.lease(chance.choice((1, 16, 200)), chance.randint(1, PARTS)))
            case "settle" if leases:
                world.settle(leases.pop(chance.randrange(len(leases))), chance.choice((None, 0, 3)))
            case "spend":
                world.spend(chance.randint(1, PARTS), chance.randint(1, HORIZON // 4))
            case "copy":
                copies.append(world.copy())
            case "restore" if chance.random() < 0.5:
                world.spend(chance.randint(1, PARTS), 1)  # otherwise nothing may be lost
                world.restore(chance.choice(copies))
                leases = []
                world.check()
    world.check()


def test_tokens_that_open_leases_gave_back_are_charged_at_the_pace_of_their_time(
    tmp_path: Path, terms: PrivacyBudget
) -> None:
    """At the copy, an open lease seems to have passed the horizon, after which a part that is new pays slowly."""
    horizon, held = 2**14, 10
    world = World(tmp_path, terms.model_copy(update={"horizon": horizon}), (DirectoryAnchor(tmp_path),))
    world.spend(1, horizon - held // 2)
    lease = world.lease(held, 1)
    copy = world.copy()
    world.settle(lease, 0)
    world.spend(PARTS, held)
    world.restore(copy)
    world.check()


def test_parts_beyond_the_partition_are_refused(world: World) -> None:
    with pytest.raises(LeaseRefused, match=f"{PARTS} parts"):
        world.lease(1, PARTS + 1)


def test_a_number_of_tokens_empties_the_accounts_of_all_parts(world: World, tmp_path: Path) -> None:
    world.spend(FEW, 5)
    Ledger.restore(tmp_path / "ledger.db", read(tmp_path / "ledger.db").terms).forfeit(HORIZON)
    assert read(tmp_path / "ledger.db").accounts.charged == (WHOLE,) * PARTS
