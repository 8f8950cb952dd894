import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from tests.postgresql import Server
from tests.support.terms import CLINIC


def known(number: float | None) -> float:
    """Returns an optional number of a statement or of terms that the test knows to be set."""
    assert number is not None
    return number


def die_at_creation(patch: pytest.MonkeyPatch, made: bool) -> None:
    """Lets the process of each creation of a ledger die before it, or after the ledger is `made`."""
    create = Ledger.create

    def die(*arguments: Any, **options: Any) -> None:
        if made:
            create(*arguments, **options)
        raise KeyboardInterrupt

    patch.setattr(Ledger, "create", die)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, path: Path) -> str:
    """A path or URL for a ledger. The tests that use it run with both databases."""
    if request.param == "sqlite":
        return str(path)
    server: Server = request.getfixturevalue("postgresql")
    return server.database()


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that every user may read and write; pytest's own belong to one user."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    yield directory
    directory.chmod(0o777)
    shutil.rmtree(directory)


@pytest.fixture
def ensemble(tmp_path: Path) -> Path:
    """An ensemble's directory, without a receipt."""
    directory = tmp_path / "ensemble"
    directory.mkdir()
    return directory


@pytest.fixture
def second(tmp_path: Path) -> str:
    """A directory for the second anchor."""
    (tmp_path / "anchors").mkdir()
    return str(tmp_path / "anchors")


@pytest.fixture(scope="session")
def terms() -> PrivacyBudget:
    return CLINIC


@pytest.fixture
def ledger(place: str, terms: PrivacyBudget) -> Ledger:
    return Ledger.create(place, terms)


@pytest.fixture
def measured(terms: PrivacyBudget) -> PrivacyBudget:
    """A budget of measured losses."""
    return terms.model_copy(update={"enforced": "measured"})


@pytest.fixture(scope="session")
def roomy(terms: PrivacyBudget) -> PrivacyBudget:
    """A budget that no test exhausts."""
    return terms.model_copy(update={"epsilon": 1e4})
