"""Claim: a database that answers each query from another signed prefix of the chain gets no token granted twice."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text

from privmix.budget.anchor import ChainEnd, DirectoryAnchor
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import check
from privmix.budget.signing import SigningKey
from privmix.foundation.errors import LedgerError, LedgerRolledBack
from tests.services.budget.events import COARSE

KEY = SigningKey(b"k" * 32)
QUERIES = 4
"""How many of the first queries lie each in their own way; the later ones repeat the last."""


class Cut:
    """A ledger whose budget is spent, cut off after a signed row; its database can still show what is gone."""

    def __init__(self, place: str, folder: Path, terms: PrivacyBudget) -> None:
        (folder / "anchor").mkdir()
        self.place, self.terms = place, terms
        self.anchor = DirectoryAnchor(folder / "anchor")
        ledger = Ledger.create(place, terms, anchors=(self.anchor,), key=KEY)
        ledger.lease(COARSE, 8)
        self.identity, self.length = ledger.balance().id, ledger.balance().rows
        while ledger.lease(COARSE, 64).count:
            pass
        end = self.anchor.read(self.identity)
        assert end is not None
        self.end: ChainEnd = end
        url = place if "://" in place else f"sqlite:///{place}"
        self._engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with self._engine.begin() as connection:
            if "://" in place:
                connection.execute(text("DROP TRIGGER privmix_ledger_change ON privmix_ledger"))
            else:
                for change in ("UPDATE", "DELETE", "INSERT"):
                    connection.execute(text(f"DROP TRIGGER privmix_ledger_{change}"))
            connection.execute(text(f"CREATE TABLE gone AS SELECT * FROM privmix_ledger WHERE seq > {self.length}"))

    def again(self) -> None:
        """Cuts the ledger again, and puts back what the anchor knew."""
        with self._engine.begin() as connection:
            connection.execute(text(f"DELETE FROM privmix_ledger WHERE seq > {self.length}"))
        stored = self.anchor.read(self.identity)
        assert stored is not None
        self.anchor.swap(self.end, stored)

    @contextmanager
    def lying(self, shown: Sequence[bool]) -> Iterator[None]:
        """Shows the rows that are gone to the queries for which `shown` says so."""
        answers = iter(shown)
        last = shown[-1]

        def rewrite(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> tuple[str, Any]:
            if "FROM privmix_ledger " not in statement.replace("\n", " ") + " " or statement.startswith("DELETE"):
                return statement, parameters
            table = "(SELECT * FROM privmix_ledger UNION ALL SELECT * FROM gone) AS privmix_ledger"
            if next(answers, last):
                statement = statement.replace("FROM privmix_ledger", f"FROM {table}")
            return statement, parameters

        event.listen(Engine, "before_cursor_execute", rewrite, retval=True)
        try:
            yield
        finally:
            event.remove(Engine, "before_cursor_execute", rewrite)


@pytest.fixture
def cut(place: str, tmp_path: Path, terms: PrivacyBudget) -> Cut:
    cut = Cut(place, tmp_path, terms)
    cut.again()
    return cut


def refused(cut: Cut, use: Callable[[], object]) -> int:
    """Tries every way to answer the first queries, and returns how many of them were refused."""
    count = 0
    for shown in product((False, True), repeat=QUERIES):
        cut.again()
        with cut.lying(shown):
            try:
                assert not use(), shown
            except LedgerError:
                count += 1
        stored = cut.anchor.read(cut.identity)
        assert stored is not None
        assert stored.rows >= cut.end.rows, "an anchor never goes back"
    return count


def test_a_writer_grants_nothing(cut: Cut) -> None:
    def spend() -> int:
        ledger = Ledger.open(
            cut.place, cut.terms, identity=cut.identity, anchors=(cut.anchor,), key=KEY, holder="service"
        )
        return ledger.lease(COARSE, 1).count

    assert 0 < refused(cut, spend) < 2**QUERIES, "only what shows all rows to all queries is accepted"


def test_a_check_finds_it(cut: Cut) -> None:
    for shown in product((False, True), repeat=QUERIES):
        with cut.lying(shown):
            try:
                check(cut.place, cut.terms, cut.identity, (cut.anchor,))
            except LedgerError:
                continue
        assert any(shown), "what was replayed had the rows"
    with cut.lying([True, True, False]), pytest.raises(LedgerRolledBack):
        check(cut.place, cut.terms, cut.identity, (cut.anchor,))


def test_a_writer_that_lost_its_state_does_not_continue_on_an_earlier_prefix(cut: Cut) -> None:
    for shown in product((False, True), repeat=QUERIES):
        cut.again()
        with cut.lying([True]):
            ledger = Ledger.open(cut.place, cut.terms, anchors=(cut.anchor,), key=KEY, holder="service")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("privmix.budget.ledger.append", fails)
            with cut.lying([True]), pytest.raises(LedgerError):
                ledger.take_over()
        with cut.lying(shown), suppress(LedgerError):
            assert not ledger.lease(COARSE, 1).count, shown


def fails(*_: object) -> None:
    raise LedgerError("the commit failed")


def test_only_forfeit_follows_a_restoration(cut: Cut) -> None:
    ledger = Ledger.restore(cut.place, cut.terms, anchors=(cut.anchor,), key=KEY)
    with pytest.raises(LedgerRolledBack):
        ledger.lease(COARSE, 1)
    assert cut.anchor.read(cut.identity) == cut.end
    assert ledger.forfeit().total() == cut.end.tokens.total() - 8
    assert ledger.lease(COARSE, 1).count == 0
