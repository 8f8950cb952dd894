"""Claim: with a key that the database does not hold, a rewritten chain is found by a writer and by a verification."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import delete, insert

from privmix.budget.chain import LedgerRow, link
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import verify
from privmix.budget.records import Leased, Settled
from privmix.budget.signing import SigningKey
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.schema import ledger_table
from privmix.foundation.errors import InputError, LedgerUnsigned
from tests.services.budget.events import COARSE, FINE
from tests.services.budget.tampering import append, stored, tamper

KEY = SigningKey(b"k" * 32)
OTHER = SigningKey(b"o" * 32)


def rewrite(path: Path, change: Callable[[LedgerRow], LedgerRow | None]) -> None:
    """Changes or leaves out rows and links all of them anew, as somebody with access to the database can."""
    chain: list[LedgerRow] = []
    for row in stored(path):
        if changed := change(row):
            before = chain[-1] if chain else None
            chain.append(link(before, epoch=changed.epoch, kind=changed.kind, body=changed.body, at=changed.at))
    tamper(path, "DELETE FROM privmix_ledger")
    with LedgerDatabase(path, "write").transaction() as connection:
        connection.execute(delete(ledger_table))
        connection.execute(insert(ledger_table), [row._asdict() for row in chain])


def without_fine_leases(row: LedgerRow) -> LedgerRow | None:
    return None if row.kind == Leased.kind and '"radius":0.2' in row.body.replace(" ", "") else row


def without_signatures(row: LedgerRow) -> LedgerRow | None:
    return None if row.kind == "signature" else without_fine_leases(row)


def test_each_commit_is_signed(place: str, terms: PrivacyBudget) -> None:
    ledger = Ledger.create(place, terms, key=KEY)
    ledger.settle(ledger.lease(COARSE, 10).lease, 3)
    kinds = [row.kind for row in stored(place)]
    assert kinds[::2] == ["terms", "epoch", "lease", "settle"]
    assert kinds[1::2] == ["signature"] * 4
    assert verify(place, key=KEY) == ledger.balance()
    with pytest.raises(LedgerUnsigned, match=f"signed with the key {KEY.name}, not with {OTHER.name}"):
        verify(place, key=OTHER)
    assert Ledger.open(place, terms, key=KEY).lease(COARSE, 1).count == 1


@pytest.mark.parametrize("change", [without_fine_leases, without_signatures])
def test_a_rewritten_chain_is_found(
    path: Path, terms: PrivacyBudget, change: Callable[[LedgerRow], LedgerRow | None]
) -> None:
    ledger = Ledger.create(path, terms, key=KEY)
    ledger.lease(FINE, 100)
    ledger.lease(COARSE, 10)
    rewrite(path, change)
    assert verify(path).charged == {COARSE: 10}, "the chain alone does not tell"
    with pytest.raises(LedgerUnsigned, match="it was rewritten"):
        verify(path, key=KEY)
    with pytest.raises(LedgerUnsigned, match="it was rewritten"):
        Ledger.open(path, terms, key=KEY)


def test_rows_that_are_written_without_the_key_are_found_by_the_running_writer(
    place: str, terms: PrivacyBudget
) -> None:
    """Somebody with access to the database returns tokens of a lease to the budget."""
    for key in (None, KEY):
        ledger = Ledger.create(place, terms, key=key)
        lease = ledger.lease(COARSE, 10).lease
        forged = Settled(lease=lease, used=0)
        append(place, epoch=ledger.balance().epoch, kind=Settled.kind, body=forged.model_dump_json())
        if key is None:
            assert ledger.lease(COARSE, 1).count == 1, "the chain alone does not tell"
            continue
        with pytest.raises(LedgerUnsigned, match="are not signed"):
            ledger.lease(COARSE, 1)
        with pytest.raises(LedgerUnsigned, match="are not signed"):
            ledger.check()
        with pytest.raises(LedgerUnsigned, match="are not signed"):
            verify(place, key=key)


def test_a_key_is_introduced_and_replaced_on_purpose(place: str, terms: PrivacyBudget) -> None:
    Ledger.create(place, terms).lease(COARSE, 10)
    for key in (KEY, OTHER):
        with pytest.raises(LedgerUnsigned, match="privmix ledger init"):
            Ledger.open(place, terms, key=key)
        Ledger.create(place, terms, key=key, holder="init")
        assert Ledger.open(place, terms, key=key).lease(COARSE, 1).count == 1
        assert verify(place, key=key).charged[COARSE] in (11, 12)


def test_a_damaged_chain_is_not_signed(path: Path, terms: PrivacyBudget) -> None:
    Ledger.create(path, terms).lease(COARSE, 10)
    tamper(path, "UPDATE privmix_ledger SET hash = replace(hash, 'a', 'b')")
    before = stored(path)
    with pytest.raises(Exception, match="was changed"):
        Ledger.create(path, terms, key=KEY, holder="init")
    assert stored(path) == before


def test_a_key_is_long_and_is_not_shown() -> None:
    assert SigningKey.of("k" * 32 + "\n") == KEY
    assert SigningKey.of(None) is None
    assert "kkk" not in repr(KEY)
    with pytest.raises(InputError, match=r"budget\.signing_key"):
        SigningKey.of("k" * 31)
