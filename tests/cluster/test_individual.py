"""Claim: with individual budgets, a client sees the same of two services whose ensembles differ in one part.

The parts' accounts are spent far beyond their end. The texts alone may differ: they are sampled. Only a key with the
scope `administer` sees the accounts, in the console.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import httpx
import pytest

from services.budget.reader import read
from services.budget.statement import AccountsStatement
from services.database.service import ServiceDatabase
from services.keys.records import SCOPES, Scope
from services.keys.store import KeyStore
from services.training.manifest import Manifest, hash_adapter
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, running, settled
from tests.services.alerts.receiver import Receiver, receiving

PARTS = 3
HORIZON = 64
ALERTS_S = 0.5
# What differs between two requests to one service: names, times, and sampled texts with their lengths.
VARIES = {"id", "created", "text", "content", "date", "x-request-id", "content-length", "at", "resident_bytes"}
# Every answer has the same length, which would otherwise be sampled.
LENGTH = {"model": "privmix", "ignore_eos": True}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **LENGTH}
REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    *[("POST", "/v1/completions", {"prompt": "Caller: Hello", "max_tokens": 24, "n": 4, **LENGTH})] * 3,
    ("POST", "/v1/chat/completions", HELLO),
    ("POST", "/v1/completions", {"prompt": ["One", "Two"], "max_tokens": 4, "logprobs": 3, "model": "privmix"}),
    ("POST", "/v1/completions", {"prompt": "One", "max_tokens": 0, "model": "privmix"}),
    ("POST", "/v1/completions", {"prompt": "One", "model": "other"}),
    ("GET", "/v1/privacy", None),
    ("GET", "/v1/models", None),
    ("GET", "/health", None),
    ("GET", "/readyz", None),
    ("GET", "/v1/keys", None),
]
STREAMS = [
    ("/v1/completions", {"prompt": "One", "max_tokens": 8, "stream": True, **LENGTH}),
    ("/v1/chat/completions", {**HELLO, "stream": True, "stream_options": {"include_usage": True}}),
]
BATCH = [
    {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {"prompt": "Two", **LENGTH}}
    for number in range(3)
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


@dataclass(frozen=True)
class Served:
    """A service, the alerts that it sent, and the secrets of an operator's key and of a client's key."""

    service: RunningService
    alerts: Receiver
    operator: str
    client: str


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    folder = tmp_path_factory.mktemp("individual")
    ensemble = write_ensemble(folder / "ensemble", PARTS)
    copies = [copytree(ensemble, folder / "a" / "ensemble"), neighbour(ensemble, folder / "b" / "ensemble")]
    started = []
    with ExitStack() as stack:
        for copied in copies:
            store = KeyStore(ServiceDatabase(copied.parent / "keys.db"))
            secrets = [store.create(name, scopes=scopes)[1].text for name, scopes in KEYS.items()]
            receiver = stack.enter_context(receiving())
            config = configure(
                copied.parent,
                copied,
                privacy={"protocol": "individual", "epsilon": 8.0, "tokens": HORIZON},
                alerts={"webhooks": [receiver.url], "thresholds": [0.1, 0.5, 0.9], "interval_s": ALERTS_S},
            )
            started.append(Served(stack.enter_context(running(config)), receiver, *secrets))
        yield started


KEYS: dict[str, tuple[Scope, ...]] = {"operator": SCOPES, "client": ("generate", "privacy")}


def masked(value: Any) -> Any:
    """Removes what differs between two requests to one service."""
    if isinstance(value, dict):
        return {key: masked(own) for key, own in value.items() if key not in VARIES}
    return [masked(own) for own in value] if isinstance(value, list) else value


def seen(served: Served) -> list[Any]:
    """Returns all that a client sees of a service, without the sampled texts."""
    answers: list[Any] = []
    with httpx.Client(base_url=served.service.base_url, headers=bearer(served.client), timeout=300) as client:
        for method, path, body in REQUESTS:
            answer = client.request(method, path, json=body)
            headers = {name: own for name, own in answer.headers.items() if name not in VARIES}
            answers.append((path, answer.status_code, headers, masked(answer.json())))
            settled(served.service, client)
        for path, body in STREAMS:
            lines = client.post(path, json=body).text.splitlines()
            answers.append((path, [masked(json.loads(line[6:])) for line in lines if line.startswith("data: {")]))
            settled(served.service, client)
        answers.append(batch(client))
        settled(served.service, client)
    snapshot = first_snapshot(served.service, served.client)
    assert snapshot["accounts"] is snapshot["keys"] is None, "not with the client's scopes"
    traffic = snapshot.pop("traffic")
    time.sleep(4 * ALERTS_S)
    # A slow machine may cause alerts of a stall.
    alerts = [event for event in served.alerts.events() if not event[0].startswith("service.")]
    return [*answers, masked(snapshot), sorted(traffic), alerts]


def posted(client: httpx.Client, path: str, **content: Any) -> dict[str, Any]:
    """Posts again after a 503, as OpenAI's clients do: the actor of the batches may still be starting."""
    for _ in range(30):
        answer = client.post(path, **content)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        time.sleep(2)
    created: dict[str, Any] = answer.raise_for_status().json()
    return created


def batch(client: httpx.Client) -> Any:
    """Runs a batch and returns its lines, in the order of the requests."""
    lines = "\n".join(json.dumps(line) for line in BATCH).encode()
    file = posted(client, "/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"})["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    created = posted(client, "/v1/batches", json=body)
    path, deadline = f"/v1/batches/{created['id']}", time.monotonic() + 300
    while created.get("status") not in ("completed", "failed", "expired"):  # a 503 has none
        assert time.monotonic() < deadline, created
        time.sleep(0.2)
        created = client.get(path).json()
    output = client.get(f"/v1/files/{created['output_file_id']}/content").text.splitlines()
    answers = sorted((json.loads(line) for line in output), key=lambda line: str(line["custom_id"]))
    counts = created["request_counts"]
    return created["status"], counts, [masked({**line, "response": line["response"]["body"]}) for line in answers]


def first_snapshot(service: RunningService, secret: str) -> Any:
    """Returns what the console shows first to a key."""
    with httpx.stream("GET", f"{service.base_url}/v1/console", headers=bearer(secret), timeout=300) as stream:
        return json.loads(next(line for line in stream.iter_lines() if line.startswith("data: "))[6:])


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_client_sees_the_same_of_neighbouring_ensembles(services: list[Served]) -> None:
    first, second = map(seen, services)
    assert first == second
    for served in services:
        balance = read(served.service.ledger)
        assert sum(balance.charged.values()) > 3 * HORIZON, "no token was refused"
        assert max(balance.accounts.charged) > 0
    accounts = [read(served.service.ledger).accounts.charged for served in services]
    assert accounts[0] != accounts[1], "the accounts differ, and nothing that a client sees"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_operator_sees_the_accounts_in_the_console(services: list[Served]) -> None:
    for served in services:
        with httpx.Client(base_url=served.service.base_url, headers=bearer(served.operator), timeout=300) as client:
            client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 24, **LENGTH}).raise_for_status()
            settled(served.service, client)
        accounts = AccountsStatement.of(read(served.service.ledger).accounts)
        assert accounts is not None
        assert first_snapshot(served.service, served.operator)["accounts"] == accounts.model_dump()
