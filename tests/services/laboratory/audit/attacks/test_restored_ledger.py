"""Claim: the audit finds a `forfeit` that charges only the parts that the restored copy knows."""

import pytest

from privmix.budget.accounts import Accounts, Grains
from privmix.laboratory.audit.attacks import pipeline, restored_ledger
from privmix.laboratory.audit.report.finding import broken

_largest = Accounts.largest


def test_a_restored_ledger_charges_all_parts() -> None:
    assert restored_ledger.forfeit_faults() == ()


def test_a_forfeit_that_charges_the_parts_of_the_copy_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted: list[int] = []

    def of_the_copy(accounts: Accounts, parts: int, first: int, last: int, horizon: int, count: int) -> Grains:
        planted.append(parts)
        return _largest(accounts, len(accounts.charged), first, last, horizon, count)

    monkeypatch.setattr(Accounts, "largest", of_the_copy)
    faults = restored_ledger.forfeit_faults()
    assert len(planted) == 6
    assert [fault.partition(",")[0] for fault in faults] == [
        f"after restoration {times} of a copy {copy}"
        for copy in ("of a new ledger", "from before the ensemble grew")
        for times in (1, 2)
    ]
    (found,) = broken([pipeline.finding("privmix ledger forfeit", faults, restored_ledger.ATTACK)])
    assert "refuted by the restoration of older copies" in found.sentence
