"""Claim: a killed budget actor recovers its whole state, and a replaced one grants nothing."""

from pathlib import Path

import pytest
import ray

from privmix.budget.actor import NAME, start
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reader import read
from privmix.foundation.errors import Fenced, LedgerMismatch, LedgerMissing
from tests.services.budget.conftest import Allowance
from tests.services.budget.events import COARSE

COARSE_JSON = COARSE.to_json()


def test_a_restarted_actor_has_its_whole_state(allowance: Allowance) -> None:
    actor, epoch = allowance.actor, read(allowance.path).epoch
    kept = ray.get(actor.lease.remote(COARSE_JSON, 10, "kept"))
    ray.get(actor.lease.remote(COARSE_JSON, 20))
    allowance.restart()
    assert ray.get(actor.lease.remote(COARSE_JSON, 10, "kept")) == kept, "a repeated request returns the same lease"
    assert allowance.charged() == {COARSE: 30}
    ray.get(actor.settle.remote("kept", 4))
    assert allowance.charged() == {COARSE: 24}
    assert read(allowance.path).epoch == epoch + 1


@pytest.mark.slow
def test_an_actor_killed_during_requests_grants_each_once(allowance: Allowance) -> None:
    requests = [allowance.actor.lease.remote(COARSE_JSON, 3, f"lease-{number}") for number in range(60)]
    ray.wait(requests, num_returns=5)
    ray.kill(allowance.actor, no_restart=False)
    assert [grant.count for grant in ray.get(requests)] == [3] * 60
    assert allowance.charged() == {COARSE: 180}


def test_a_replaced_actor_grants_nothing(allowance: Allowance, roomy: PrivacyBudget) -> None:
    lease = ray.get(allowance.actor.lease.remote(COARSE_JSON, 10)).lease
    successor = Ledger.create(allowance.path, roomy)
    for request in (allowance.actor.lease.remote(COARSE_JSON, 1), allowance.actor.settle.remote(lease, 0)):
        with pytest.raises(Fenced):
            ray.get(request)
    successor.settle(lease, 4)
    assert allowance.charged() == {COARSE: 4}
    successor.give_up()
    assert ray.get(allowance.actor.lease.remote(COARSE_JSON, 1)).count == 1
    with pytest.raises(Fenced):
        successor.lease(COARSE, 1)


@pytest.mark.slow
def test_an_actor_restarted_without_its_ledger_creates_no_new_one(allowance: Allowance) -> None:
    ray.get(allowance.actor.lease.remote(COARSE_JSON, 10))
    away = allowance.path.rename(allowance.path.with_suffix(".away"))
    ray.kill(allowance.actor, no_restart=False)
    with pytest.raises(LedgerMissing, match="put it back"):
        ray.get(allowance.actor.lease.remote(COARSE_JSON, 10))
    away.rename(allowance.path)
    assert ray.get(allowance.actor.lease.remote(COARSE_JSON, 10)).count == 10
    assert allowance.charged() == {COARSE: 20}


@pytest.mark.slow
def test_a_start_with_another_promise_leaves_no_actor(cluster: None, path: Path, terms: PrivacyBudget) -> None:
    Ledger.create(path, terms)
    with pytest.raises(LedgerMismatch, match=r"epsilon is 8\.0 there and 9\.0 here") as caught:
        start(str(path), terms.model_copy(update={"epsilon": 9.0}), namespace="another-promise")
    assert type(caught.value) is LedgerMismatch
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ray.get_actor(NAME, "another-promise")
