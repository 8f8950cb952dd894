"""Claim: with individual budgets, a client sees the same of two services whose ensembles differ in one part.

The parts' accounts are spent far beyond their end. The texts alone may differ: they are sampled.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import httpx
import pytest

from services.budget.reader import read
from services.budget.statement import statement
from services.training.manifest import Manifest, hash_adapter
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, running, settled

PARTS = 3
HORIZON = 64
VARIES = {"id", "created", "text", "content", "date", "x-request-id", "content-length"}
# Every answer has the same length, which would otherwise be sampled.
LENGTH = {"model": "privmix", "ignore_eos": True}
REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    *[("POST", "/v1/completions", {"prompt": "Caller: Hello", "max_tokens": 24, "n": 4, **LENGTH})] * 3,
    ("POST", "/v1/completions", {"prompt": ["One", "Two"], "max_tokens": 4, "logprobs": 3, "model": "privmix"}),
    ("POST", "/v1/completions", {"prompt": "One", "max_tokens": 0, "model": "privmix"}),
    ("POST", "/v1/completions", {"prompt": "One", "model": "other"}),
    ("GET", "/v1/privacy", None),
    ("GET", "/v1/models", None),
    ("GET", "/health", None),
    ("GET", "/readyz", None),
]


def neighbour(ensemble: Path, folder: Path) -> Path:
    """Copies an ensemble and replaces its last part's model by the first one's."""
    copied = copytree(ensemble, folder)
    manifest = Manifest.load(copied)
    first, last = manifest.parts[0], manifest.parts[-1]
    rmtree(copied / last.path)
    copytree(copied / first.path, copied / last.path)
    replaced = last.model_copy(update={"sha256": hash_adapter(copied / last.path)})
    manifest.model_copy(update={"parts": (*manifest.parts[:-1], replaced)}).save(copied)
    return copied


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningService]]:
    folder = tmp_path_factory.mktemp("individual")
    ensemble = write_ensemble(folder / "ensemble", PARTS)
    copies = [copytree(ensemble, folder / "a" / "ensemble"), neighbour(ensemble, folder / "b" / "ensemble")]
    started = []
    with ExitStack() as stack:
        for copied in copies:
            privacy = {"protocol": "individual", "epsilon": 8.0, "tokens": HORIZON}
            started.append(stack.enter_context(running(configure(copied.parent, copied, privacy=privacy))))
        yield started


def masked(value: Any) -> Any:
    """Removes what differs between two requests to one service."""
    if isinstance(value, dict):
        return {key: masked(own) for key, own in value.items() if key not in VARIES}
    return [masked(own) for own in value] if isinstance(value, list) else value


def seen(service: RunningService) -> list[Any]:
    """Returns all that a client sees of a service, without the sampled texts."""
    answers = []
    for method, path, body in REQUESTS:
        answer = httpx.request(method, service.base_url + path, json=body, timeout=300)
        headers = {name: own for name, own in answer.headers.items() if name not in VARIES}
        answers.append((path, answer.status_code, headers, masked(answer.json())))
        settled(service)
    return answers


@pytest.mark.slow
def test_a_client_sees_the_same_of_neighbouring_ensembles(services: list[RunningService]) -> None:
    first, second = map(seen, services)
    assert first == second
    for service in services:
        balance = read(service.ledger)
        assert sum(balance.charged.values()) > 3 * HORIZON, "no token was refused"
        assert max(balance.accounts.charged) > 0
        assert statement(balance).accounts is not None
    accounts = [read(service.ledger).accounts.charged for service in services]
    assert accounts[0] != accounts[1], "the accounts differ, and nothing that a client sees"
