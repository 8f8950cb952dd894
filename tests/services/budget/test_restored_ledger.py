"""Claim: `forfeit` charges every part what it paid, whatever the restored copy knows."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from privmix.budget.accounts import Accounts, Grains
from privmix.budget.anchor import DirectoryAnchor
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.privacy.protocols.individual import WHOLE, IndividualSettings

_largest = Accounts.largest
_PARTS, _FEW, _TOKENS = 8, 3, 64
_COPIES = {"of a new ledger": 0, "from before the ensemble grew": _FEW, "from the same ensemble": _PARTS}
_RESTORED = 2


def forfeit_faults() -> tuple[str, ...]:
    """Returns what `forfeit` leaves too full, as sentences."""
    with TemporaryDirectory() as folder:
        return tuple(
            fault for number, copy in enumerate(_COPIES) for fault in _faults(Path(folder) / str(number), copy)
        )


def _faults(folder: Path, copy: str) -> list[str]:
    folder.mkdir()
    settings = IndividualSettings(tokens=_TOKENS)
    terms = PrivacyBudget.of("audit", settings, settings.plan(_FEW), partition=f"audit, {_PARTS} parts")
    place, kept, anchors = folder / "ledger.db", folder / "copy.db", (DirectoryAnchor(folder),)
    paid, faults = [0] * _PARTS, []
    ledger = Ledger.create(place, terms, anchors=anchors)
    if _COPIES[copy]:
        _spend(ledger, _COPIES[copy], 1, paid)
    shutil.copy(place, kept)
    for restored in range(1, 1 + _RESTORED):
        _spend(ledger, _PARTS, _TOKENS, paid)
        shutil.copy(kept, place)
        Ledger.restore(place, terms, anchors=anchors).forfeit()
        ledger = Ledger.open(place, terms, anchors=anchors)
        entered = ledger.balance().accounts.charged
        known = [*entered, *[0] * (_PARTS - len(entered))]
        short = [own - charged for own, charged in zip(paid, known, strict=True) if own > charged]
        if short:
            faults.append(
                f"after restoration {restored} of a copy {copy}, {len(short)} of {_PARTS} accounts lack what their "
                f"parts paid, up to {max(short) / WHOLE:.2f} of an account"
            )
    return faults


def _spend(ledger: Ledger, parts: int, tokens: int, paid: list[int]) -> None:
    """Releases tokens that charge each part the most that they may, and adds it to what the part paid."""
    event = IndividualSettings(tokens=_TOKENS).plan(parts).event
    while tokens > 0:
        granted = ledger.lease(event, tokens, None, parts)
        charges = tuple(granted.count * own for own in granted.allowances)
        ledger.settle(granted.lease, granted.count, charges)
        tokens -= granted.count
        for part, own in enumerate(charges):
            paid[part] += own


def test_a_restored_ledger_charges_all_parts() -> None:
    assert forfeit_faults() == ()


def test_a_forfeit_that_charges_the_parts_of_the_copy_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted: list[int] = []

    def of_the_copy(accounts: Accounts, parts: int, first: int, last: int, horizon: int, count: int) -> Grains:
        planted.append(parts)
        return _largest(accounts, len(accounts.charged), first, last, horizon, count)

    monkeypatch.setattr(Accounts, "largest", of_the_copy)
    faults = forfeit_faults()
    assert len(planted) == 6
    assert [fault.partition(",")[0] for fault in faults] == [
        f"after restoration {times} of a copy {copy}"
        for copy in ("of a new ledger", "from before the ensemble grew")
        for times in (1, 2)
    ]
