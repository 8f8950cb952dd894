"""Claim: reading a ledger detects every change that a ledger did not make, and names the row."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privmix.budget.chain import GENESIS, LedgerRow, link, verified
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.foundation.errors import LedgerCorrupt
from tests.services.budget.events import COARSE, FINE
from tests.services.budget.tampering import append, tamper

texts = st.text(max_size=20)


@st.composite
def chains(draw: st.DrawFn) -> list[LedgerRow]:
    rows: list[LedgerRow] = []
    for kind, body, at in draw(st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=8)):
        rows.append(link(rows[-1] if rows else None, epoch=0, kind=kind, body=body, at=at))
    return rows


@given(chains())
def test_an_unchanged_chain_is_verified(rows: list[LedgerRow]) -> None:
    assert list(verified(rows)) == rows
    assert [row.previous for row in rows] == [GENESIS, *(row.hash for row in rows[:-1])]


@given(chains(), st.data())
def test_a_changed_row_is_detected(rows: list[LedgerRow], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.sampled_from(["seq", "epoch", "kind", "body", "at", "previous", "hash"]))
    before = getattr(rows[index], field)
    after: Any = data.draw((st.integers() if isinstance(before, int) else texts).filter(lambda value: value != before))
    rows[index] = rows[index]._replace(**{field: after})
    with pytest.raises(LedgerCorrupt, match=rf"row {index + 1} "):
        list(verified(rows))


@given(chains().filter(lambda rows: len(rows) > 1), st.data())
def test_a_row_that_is_forged_with_its_hash_or_deleted_is_detected(rows: list[LedgerRow], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(rows) - 2))
    forged = rows[index]._replace(body=rows[index].body + "!")
    changed = [*rows[:index], forged._replace(hash=forged.digest), *rows[index + 1 :]]
    with pytest.raises(LedgerCorrupt, match=rf"row {index + 2} does not follow row {index + 1}"):
        list(verified(changed))
    with pytest.raises(LedgerCorrupt, match=rf"row {index + 1} is missing"):
        list(verified([*rows[:index], *rows[index + 1 :]]))


@pytest.fixture
def written(path: Path, terms: PrivacyBudget) -> Path:
    """A ledger of five rows: 1 terms, 2 epoch, 3 lease, 4 settle, 5 lease."""
    ledger = Ledger.create(path, terms)
    ledger.settle(ledger.lease(COARSE, 10).lease, 4)
    ledger.lease(FINE, 20)
    return path


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE privmix_ledger SET body = replace(body, '10', '11') WHERE seq = 3", "row 3 was changed"),
        ("UPDATE privmix_ledger SET body = replace(body, '20', '2') WHERE seq = 5", "row 5 was changed"),
        ("UPDATE privmix_ledger SET body = replace(body, '8.0', '80.0') WHERE seq = 1", "row 1 was changed"),
        ("UPDATE privmix_ledger SET body = x'fffe' WHERE seq = 3", "row 3 was changed"),
        ("UPDATE privmix_ledger SET body = CAST(x'fffe' AS TEXT) WHERE seq = 3", "row 3 was changed"),
        ("UPDATE privmix_ledger SET epoch = 0 WHERE seq = 2", "row 2 was changed"),
        ("UPDATE privmix_ledger SET at = '' WHERE seq = 4", "row 4 was changed"),
        ("DELETE FROM privmix_ledger WHERE seq = 3", "row 3 is missing"),
        ("DELETE FROM privmix_ledger WHERE seq = 1", "row 1 is missing"),
    ],
)
def test_tampering_is_reported_with_the_ledger_and_the_row(
    written: Path, terms: PrivacyBudget, statement: str, message: str
) -> None:
    tamper(written, statement)
    for use in (lambda: read(written), lambda: Ledger.create(written, terms)):
        with pytest.raises(LedgerCorrupt, match=message) as caught:
            use()
        assert str(written) in str(caught.value)


def test_a_running_writer_detects_that_the_last_rows_are_deleted(path: Path, terms: PrivacyBudget) -> None:
    ledger = Ledger.create(path, terms)
    ledger.lease(COARSE, 10)
    tamper(path, "DELETE FROM privmix_ledger WHERE seq = 3")
    with pytest.raises(LedgerCorrupt, match="row 3 is gone"):
        ledger.lease(COARSE, 1)


def test_an_impossible_row_is_refused_although_its_hash_is_correct(written: Path) -> None:
    """A forger with correct hashes cannot settle an unknown lease."""
    head = append(written, epoch=1, kind="settle", body='{"lease":"unknown","used":0}')
    with pytest.raises(LedgerCorrupt, match=rf"row {head.seq} \(settle\) contradicts"):
        read(written)


def test_a_row_of_a_past_epoch_is_refused(written: Path) -> None:
    head = append(written, epoch=0, kind="lease", body='{"lease":"late","event":{},"count":1}')
    with pytest.raises(LedgerCorrupt, match=rf"row {head.seq} was written in epoch 0 while epoch 1 was current"):
        read(written)
