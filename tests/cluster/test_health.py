"""Claim: readiness and health show each failure that needs an operator, and liveness shows none."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from privmix.budget.ledger import Ledger
from privmix.budget.reading import read
from tests.running import RunningService, configure, own_ensemble, running
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NOTICED_S = 60.0


@pytest.fixture(scope="module")
def service(ensemble: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with two copies of one shard."""
    folder = tmp_path_factory.mktemp("health")
    sections: dict[str, Any] = {
        "engine": {"kind": "transformers"},
        "shards": {"copies": 2, "num_cpus": 0.1, "parts_per_shard": 4},
    }
    with running(configure(folder, own_ensemble(ensemble, folder), **sections)) as started:
        yield started


def ready(service: RunningService) -> bool:
    assert httpx.get(f"{service.base_url}/livez", timeout=10).status_code == 200, "a restart would not help"
    return httpx.get(f"{service.base_url}/readyz", timeout=30).status_code == 200


def troubles(service: RunningService) -> dict[str, str]:
    found: dict[str, str] = httpx.get(f"{service.base_url}/health", timeout=30).json()["troubles"]
    return found


def wait_until(service: RunningService, wanted: bool) -> None:
    until(lambda: ready(service) is wanted, NOTICED_S, lambda: troubles(service), pause_s=0.5)


@contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """Stops processes during the block, so that they keep their connections and do not answer."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def shards(service: RunningService) -> list[psutil.Process]:
    titled = [item for item in service.tree() if " ".join(item.cmdline()).startswith("ray::Shard")]
    assert len(titled) == 2
    return titled


def test_one_copy_that_hangs_leaves_the_service_ready(service: RunningService) -> None:
    with stopped(shards(service)[0]):
        time.sleep(2)
        assert ready(service)


def test_a_part_group_without_a_copy_that_works_is_not_ready(service: RunningService) -> None:
    with stopped(*shards(service)):
        wait_until(service, False)
        assert "a part group is not served" in troubles(service)["coordinator"]
    wait_until(service, True)


def test_a_coordinator_that_hangs_is_not_ready(service: RunningService) -> None:
    with stopped(service.actor("Coordinator")):
        wait_until(service, False)
        assert "does not answer" in troubles(service)["coordinator"]
    wait_until(service, True)


def test_a_ledger_that_is_gone_is_not_ready_until_it_is_back(service: RunningService) -> None:
    away = service.ledger.rename(service.ledger.with_suffix(".away"))
    wait_until(service, False)
    assert troubles(service) == {"budget": "the ledger's database cannot be read or written"}
    away.rename(service.ledger)
    wait_until(service, True)


def test_a_writer_that_was_replaced_is_not_ready_until_the_other_has_ended(service: RunningService) -> None:
    """A writer takes the ledger over with its first token."""
    question = {"model": "privmix", "prompt": "The", "max_tokens": 1}
    httpx.post(f"{service.base_url}/v1/completions", json=question, timeout=60).raise_for_status()
    other = Ledger.create(service.ledger, read(service.ledger).terms)
    wait_until(service, False)
    assert "another deployment has the ledger" in troubles(service)["budget"]
    other.give_up()
    wait_until(service, True)
