import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle

from privmix.budget.actor import start
from privmix.budget.filter import Filter
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reader import read
from privmix.privacy.events import Event
from tests.postgresql import Server
from tests.services.budget.events import COARSE
from tests.support.ray_cluster import ray_cluster

NAMESPACE = "budget-tests"
ALLOWANCE = 208  # tokens of COARSE


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
    return PrivacyBudget(ensemble="clinic", epsilon=8.0, delta=1e-5, order=8.0, adjacency="one part added or removed")


@pytest.fixture(scope="session")
def roomy(terms: PrivacyBudget) -> PrivacyBudget:
    """A budget that no test exhausts."""
    return terms.model_copy(update={"epsilon": 1e4})


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    with ray_cluster(2):
        yield


@dataclass(frozen=True)
class Running:
    """A budget actor and its ledger."""

    actor: ActorHandle
    path: Path

    def restart(self) -> None:
        """Kills the actor and waits until its successor has opened the ledger."""
        epoch = read(self.path).epoch
        ray.kill(self.actor, no_restart=False)
        while read(self.path).epoch == epoch:
            time.sleep(0.05)


@pytest.fixture(scope="package")
def running(cluster: None, tmp_path_factory: pytest.TempPathFactory, roomy: PrivacyBudget) -> Iterator[Running]:
    """One actor for all tests, because its start takes seconds. It survives the tests that kill it."""
    path = tmp_path_factory.mktemp("running") / "ledger.db"
    actor = start(str(path), roomy, namespace=NAMESPACE)
    yield Running(actor, path)
    ray.kill(actor)


@dataclass(frozen=True)
class Allowance(Running):
    """The running actor with exactly `ALLOWANCE` tokens left for a test."""

    before: Counter[Event]

    def charged(self) -> Counter[Event]:
        """Returns the charges of this test so far, from the disk."""
        return Counter(read(self.path).charged) - self.before


@pytest.fixture
def allowance(running: Running, roomy: PrivacyBudget) -> Iterator[Allowance]:
    left = Filter(roomy).affordable(read(running.path).charged, COARSE)
    reserve = ray.get(running.actor.lease.remote(COARSE.to_json(), left - ALLOWANCE))
    yield Allowance(running.actor, running.path, Counter(read(running.path).charged))
    ray.get(running.actor.settle.remote(reserve.lease, 0))
