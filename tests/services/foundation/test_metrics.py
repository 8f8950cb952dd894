"""Claim: Prometheus gets the numbers of real steps and charges, and nothing that was measured on private text."""

import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from privmix.budget import actor as budget
from privmix.budget.filter import Filter
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.privacy.protocols.submix import SubMixEvent
from tests.running import free_port
from tests.services.budget.events import COARSE as EVENT
from tests.support.ray_cluster import ray_cluster
from tests.support.waiting import until

MEASURED = SubMixEvent(parts=2, order=8.0, beta=0.01)
PATIENCE = 60.0


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = free_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_metrics_report_interval_ms", "500")
        with ray_cluster(2, _metrics_export_port=port):
            yield port


def scraped(port: int, metric: str) -> float:
    """The metric's sum over all processes, once Ray's agent has it."""
    deadline = time.monotonic() + PATIENCE
    pattern = re.compile(rf"^ray_{metric}(?:_total)?{{[^}}]*}} (\S+)$", re.MULTILINE)
    while time.monotonic() < deadline:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        if found := pattern.findall(text):
            return sum(map(float, found))
        time.sleep(0.5)
    raise TimeoutError(f"no {metric} within {PATIENCE:g} s")


def terms(**changes: object) -> PrivacyBudget:
    fields = {"ensemble": "e", "epsilon": 8.0, "delta": 1e-5, "order": 8.0, "adjacency": "part", **changes}
    return PrivacyBudget.model_validate(fields)


def test_the_budget_is_shown_as_the_statement_has_it(port: int, tmp_path: Path) -> None:
    actor = budget.start(str(tmp_path / "ledger.db"), terms(), namespace="metrics")
    ray.get(actor.lease.remote(EVENT.to_json(), 100))
    stated = ray.get(actor.statement.remote())
    assert scraped(port, "privmix_budget_epsilon") == 8
    assert scraped(port, "privmix_budget_epsilon_spent") == pytest.approx(stated.epsilon_spent, abs=1e-4)
    left = Filter(terms()).affordable({EVENT: 100}, EVENT)
    assert scraped(port, "privmix_budget_tokens_left") == stated.tokens_left == left
    assert scraped(port, "privmix_leases") == 1
    ray.kill(actor)


def test_a_metric_names_the_namespace_of_its_actor(port: int, tmp_path: Path) -> None:
    """Alerts and the dashboard tell ensembles apart by it. This process, which starts the actors, has another one."""
    actors = [
        budget.start(str(tmp_path / f"{name}.db"), terms(), namespace=f"privmix.{name}") for name in ("clinic", "court")
    ]
    ray.get([actor.lease.remote(EVENT.to_json(), 1) for actor in actors])
    deadline, named = time.monotonic() + PATIENCE, set[str]()
    while not named >= {"privmix.clinic", "privmix.court"} and time.monotonic() < deadline:
        time.sleep(0.5)
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        named = set(re.findall(r'^ray_privmix_leases_total{.*ensemble="([^"]*)"', text, re.MULTILINE))
    assert named <= {"privmix.clinic", "privmix.court", "metrics", "metrics.measured"}, "no label is random"
    assert named >= {"privmix.clinic", "privmix.court"}
    for actor in actors:
        ray.kill(actor)


def test_measured_losses_are_not_shown(port: int, tmp_path: Path) -> None:
    actor = budget.start(str(tmp_path / "ledger.db"), terms(enforced="measured"), namespace="metrics.measured")
    before = scraped(port, "privmix_leases")
    ray.get(actor.charge.remote(MEASURED.to_json(), [[0.1, 0.7]], "first"))
    until(lambda: scraped(port, "privmix_leases") != before, PATIENCE)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    own = [line for line in text.splitlines() if line.startswith("ray_privmix_budget") and "measured" in line]
    assert own == []
    ray.kill(actor)
