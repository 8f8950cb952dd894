"""Claim: a writer can check that it is able to charge a token, without a charge."""

from pathlib import Path

import ray

from privmix.budget.actor import start
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from tests.services.budget.conftest import NAMESPACE
from tests.services.budget.events import COARSE


def test_an_exhausted_budget_is_healthy(place: str, terms: PrivacyBudget) -> None:
    """Clients then get 429, or answers without private text, as configured: nothing that a restart would mend."""
    ledger = Ledger.create(place, terms)
    ledger.lease(COARSE, 10_000)
    assert ledger.lease(COARSE, 1).count == 0
    ledger.check()


def test_the_actor_reports_the_state_of_its_ledger(cluster: None, path: Path, terms: PrivacyBudget) -> None:
    actor = start(str(path), terms, namespace=NAMESPACE, name="health")
    try:
        assert ray.get(actor.health.remote()) == "writable"
        kept = path.rename(path.with_suffix(".kept"))
        assert ray.get(actor.health.remote()) == "unavailable"
        kept.rename(path)
        assert ray.get(actor.health.remote()) == "writable"
        # The first charge takes the ledger over, so that another writer can fence this one.
        ray.get(actor.lease.remote(COARSE.to_json(), 1))
        Ledger.create(path, terms)
        assert ray.get(actor.health.remote()) == "fenced"
    finally:
        ray.kill(actor)
