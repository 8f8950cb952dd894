"""Claim: a ledger of another layout is refused and not changed."""

import pytest

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reader import read
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.schema import NUMBER_TABLE
from privmix.foundation.errors import LedgerForeign
from tests.services.budget.events import COARSE


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (f"DROP TABLE {NUMBER_TABLE}", f"layout is unknown: restore the table {NUMBER_TABLE}"),
        (f"DELETE FROM {NUMBER_TABLE}", "layout unknown"),
        (f"UPDATE {NUMBER_TABLE} SET number = 9", r"layout 9.* knows layout 1 alone: use the version that wrote it"),
    ],
)
def test_a_ledger_of_another_layout_is_refused_and_not_changed(
    place: str, terms: PrivacyBudget, change: str, problem: str
) -> None:
    Ledger.create(place, terms).lease(COARSE, 10)
    with LedgerDatabase(place, "write").transaction() as connection:
        connection.exec_driver_sql(change)
    for use in (lambda: Ledger.create(place, terms), lambda: Ledger.open(place, terms), lambda: read(place)):
        with pytest.raises(LedgerForeign, match=problem):
            use()
