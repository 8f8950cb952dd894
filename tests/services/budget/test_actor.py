"""Claim: a killed budget actor recovers its whole state, and a replaced one grants nothing."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle

from privmix.budget.actor import NAME, start
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.foundation.errors import Fenced, LedgerMismatch, LedgerMissing
from privmix.privacy.events import Event
from tests.services.budget.events import COARSE
from tests.support.ray_cluster import ray_cluster

COARSE_JSON = COARSE.to_json()


@dataclass
class Running:
    """A budget actor, its ledger, and what was charged before a test."""

    actor: ActorHandle
    path: Path
    before: Counter[Event]

    def charged(self) -> Counter[Event]:
        """Returns the charges of this test so far, from the disk."""
        return Counter(read(self.path).charged) - self.before


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, roomy: PrivacyBudget) -> Iterator[Running]:
    """One actor for all tests, because its start takes seconds. It survives the tests that kill it."""
    path = tmp_path_factory.mktemp("running") / "ledger.db"
    with ray_cluster(2):
        yield Running(start(str(path), roomy, namespace="budget-tests"), path, Counter())


@pytest.fixture
def running(started: Running) -> Running:
    started.before = Counter(read(started.path).charged)
    return started


def test_a_restarted_actor_has_its_whole_state(running: Running) -> None:
    actor = running.actor
    kept = ray.get(actor.lease.remote(COARSE_JSON, 10, "kept"))
    ray.get(actor.lease.remote(COARSE_JSON, 20))
    epoch = read(running.path).epoch
    ray.kill(actor, no_restart=False)
    while read(running.path).epoch == epoch:
        time.sleep(0.05)
    assert ray.get(actor.lease.remote(COARSE_JSON, 10, "kept")) == kept, "a repeated request returns the same lease"
    assert running.charged() == {COARSE: 30}
    ray.get(actor.settle.remote("kept", 4))
    assert running.charged() == {COARSE: 24}
    assert read(running.path).epoch == epoch + 1


@pytest.mark.slow
def test_an_actor_killed_during_requests_grants_each_once(running: Running) -> None:
    requests = [running.actor.lease.remote(COARSE_JSON, 3, f"lease-{number}") for number in range(60)]
    ray.wait(requests, num_returns=5)
    ray.kill(running.actor, no_restart=False)
    assert [grant.count for grant in ray.get(requests)] == [3] * 60
    assert running.charged() == {COARSE: 180}


def test_a_replaced_actor_grants_nothing(running: Running, roomy: PrivacyBudget) -> None:
    lease = ray.get(running.actor.lease.remote(COARSE_JSON, 10)).lease
    successor = Ledger.create(running.path, roomy)
    for request in (running.actor.lease.remote(COARSE_JSON, 1), running.actor.settle.remote(lease, 0)):
        with pytest.raises(Fenced):
            ray.get(request)
    successor.settle(lease, 4)
    assert running.charged() == {COARSE: 4}
    successor.give_up()
    assert ray.get(running.actor.lease.remote(COARSE_JSON, 1)).count == 1
    with pytest.raises(Fenced):
        successor.lease(COARSE, 1)


@pytest.mark.slow
def test_an_actor_restarted_without_its_ledger_creates_no_new_one(running: Running) -> None:
    ray.get(running.actor.lease.remote(COARSE_JSON, 10))
    away = running.path.rename(running.path.with_suffix(".away"))
    ray.kill(running.actor, no_restart=False)
    with pytest.raises(LedgerMissing, match="put it back"):
        ray.get(running.actor.lease.remote(COARSE_JSON, 10))
    away.rename(running.path)
    assert ray.get(running.actor.lease.remote(COARSE_JSON, 10)).count == 10
    assert running.charged() == {COARSE: 20}


@pytest.mark.slow
def test_a_start_with_another_promise_leaves_no_actor(started: Running, path: Path, terms: PrivacyBudget) -> None:
    Ledger.create(path, terms)
    with pytest.raises(LedgerMismatch, match=r"epsilon is 8\.0 there and 9\.0 here") as caught:
        start(str(path), terms.model_copy(update={"epsilon": 9.0}), namespace="another-promise")
    assert type(caught.value) is LedgerMismatch
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ray.get_actor(NAME, "another-promise")
