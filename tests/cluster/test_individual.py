"""Claim: with individual budgets, a client sees the same of two services whose ensembles differ in one part.

The parts' accounts are spent far beyond their end. A client's key drives every operation of the service's own OpenAPI
document, the pages, the errors and the metrics; what answers contain may differ by `VARIES` alone.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from privmix.budget.actor import WATCH_S
from privmix.budget.reading import read
from privmix.budget.state import Balance
from privmix.database.service import ServiceDatabase
from privmix.keys.store import KeyStore
from privmix.training.manifest import Manifest, hash_adapter
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, running, settled
from tests.support.app import app_client
from tests.support.neighbouring import unequal

PARTS = 3
HORIZON = 64
METRICS_S = 1.0
PATIENCE_S = 300.0

UNDOCUMENTED = ("/openapi.json", "/docs", "/console")
CONSOLE = "/v1/console"
# The fields and headers that differ between two requests to one service.
VARIES = {
    r"created|(\w+_)?at|date|time": "a time",
    r"(\w+_)?id|filename|x-request-id": "a name that is drawn for each object",
    r"text|content": "sampled",
    r"bytes|content-length": "the size of what is sampled",
    r"tokens_per_second|tokens_per_minute|tokens_each_second|timeline": "times of released tokens",
    r"resident_bytes": "the memory of a process, whose models have one size",
    r"service_unavailable": "refusals while an actor starts; the client tries again",
}
VARYING = re.compile("|".join(VARIES))
RAYS_LABELS = re.compile("Component|NodeAddress|SessionName|Version|WorkerId|otel_scope_.*")
# Differ between two runs of one service, too: sequences share steps and leases by chance, and an actor may start late.
METRICS_VARY = re.compile(r"privmix_(\w+_seconds_(bucket|sum)|batch_size_\w+|leases_total|refusals_total)")

# Every answer has the same length, which would otherwise be sampled.
LENGTH = {"model": "privmix", "ignore_eos": True}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **LENGTH}
LONG = {"prompt": "Hello " * 2000, "max_tokens": 4, **LENGTH}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *[("/v1/completions", {"prompt": "Caller: Hello", "max_tokens": 24, "n": 4, **LENGTH})] * 3,
    ("/v1/chat/completions", HELLO),
    ("/v1/completions", {"prompt": ["One", "Two"], "max_tokens": 4, "logprobs": 3, "model": "privmix"}),
    ("/v1/completions", {"prompt": "One", "max_tokens": 0, "model": "privmix"}),
    ("/v1/completions", {"prompt": "One", "model": "other"}),
    ("/v1/completions", {"prompt": "One", "temperature": 0, "model": "privmix"}),
    ("/v1/completions", {"prompt": "One", "seed": 1, "model": "privmix"}),
    ("/v1/completions", {"prompt": "One", "n": 100, "model": "privmix"}),
    ("/v1/completions", LONG),
    ("/tokenize", {"model": "privmix", "prompt": "Caller: Hello"}),
    ("/tokenize", {"model": "privmix", "messages": HELLO["messages"]}),
]
STREAMS = [
    ("/v1/completions", {"prompt": "One", "max_tokens": 8, "stream": True, **LENGTH}),
    ("/v1/chat/completions", {**HELLO, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {**LONG, "stream": True}),
]
KNOWN = {"name": "privmix"}
"""A value for each parameter of a path."""


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


Looks = tuple[dict[str, Any], Balance]
"""All that a client saw of one service, without the sampled texts, and the balance of the ledger then."""


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> list[Looks]:
    """The looks of two services, which run one after the other."""
    folder = tmp_path_factory.mktemp("individual")
    ensemble = write_ensemble(folder / "ensemble", PARTS)
    first, second = (folder / name / "served" / "ensemble" for name in ("first", "second"))
    copies = [copytree(ensemble, first), neighbour(ensemble, second)]
    looks = []
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_metrics_report_interval_ms", str(round(1000 * METRICS_S)))
        for copied in copies:
            with serving(copied) as (service, secret):
                looks.append((seen(service, secret), read(service.ledger)))
    return looks


@contextmanager
def serving(ensemble: Path) -> Iterator[tuple[RunningService, str]]:
    """Yields a service and the secret of a client's key."""
    store = KeyStore(ServiceDatabase(ensemble.parent / "keys.db"))
    _, secret = store.create("client")
    privacy = {"protocol": "individual", "epsilon": 8.0, "tokens": HORIZON}
    with running(configure(ensemble.parent, ensemble, privacy=privacy)) as service:
        yield service, secret.text


def masked(value: Any) -> Any:
    """Removes what differs between two requests to one service."""
    if isinstance(value, dict):
        return {key: masked(own) for key, own in value.items() if not VARYING.fullmatch(key)}
    return [masked(own) for own in value] if isinstance(value, list) else value


def seen(service: RunningService, secret: str) -> dict[str, Any]:
    """Returns all that a client sees of a service, without the sampled texts."""
    answers: dict[str, Any] = {}
    with httpx.Client(base_url=service.base_url, headers=bearer(secret), timeout=300) as client:
        for number, (path, body) in enumerate(REQUESTS + STREAMS):
            answers[f"{number} {path}"] = answered(client.post(path, json=body))
            settled(service, client)
        answers |= operations(client, KNOWN) | refusals(client)
    answers["metrics"] = metrics(service)
    return answers


def answered(answer: httpx.Response) -> Any:
    """Returns status, headers and body of an answer. Of a stream, events that repeat one another count once."""
    headers = {name: own for name, own in answer.headers.items() if not VARYING.fullmatch(name)}
    return [answer.status_code, headers, contents(answer.headers.get("content-type", ""), answer.text)]


def contents(kind: str, text: str) -> Any:
    match kind.partition(";")[0]:
        case "application/json":
            return masked(json.loads(text))
        case "text/event-stream":
            events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
            kinds = [json.dumps(masked(json.loads(event))) if event != "[DONE]" else event for event in events]
            return list(dict.fromkeys(kinds))
        case _:
            return text


def operations(client: httpx.Client, known: Mapping[str, str]) -> dict[str, Any]:
    """Returns the answers to every operation that the service documents, and to every page.

    Operations that need a body get an empty one, and the refusal is compared; `REQUESTS` has bodies that are accepted.
    """
    paths = client.get("/openapi.json").raise_for_status().json()["paths"]
    documented = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    every = [*documented, *(("GET", path) for path in UNDOCUMENTED), ("GET", "/metrics")]
    answers = {}
    for method, path in sorted(every, key=lambda one: (one[0] != "GET", one[1])):
        place = path.format_map(known)  # a new parameter needs a value in `KNOWN`
        if path == CONSOLE:
            client.put("/v1/completions", json={})
            answers[f"{method} {path}"] = first_snapshot(client, "method_not_allowed")
        else:
            answers[f"{method} {path}"] = answered(client.request(method, place, json=None if method == "GET" else {}))
    return answers


def refusals(client: httpx.Client) -> dict[str, Any]:
    """Returns the answers to requests that no route accepts, or that no key of the service sends."""
    typed = {"content-type": "application/json"}
    broken = [
        ("no route", client.get("/v1/nothing")),
        ("another method", client.put("/v1/completions", json={})),
        ("no JSON", client.post("/v1/completions", content=b"{", headers=typed)),
        ("a large body", client.post("/v1/completions", content=b" " * (2 << 20), headers=typed)),
        ("no such model", client.get("/v1/models/other")),
        ("a wrong key", client.get("/v1/privacy", headers=bearer("pmx_wrong"))),
        ("no key", httpx.get(client.base_url.join("/v1/privacy"))),
    ]
    return {name: answered(answer) for name, answer in broken}


def first_snapshot(client: httpx.Client, last_refusal: str) -> Any:
    """Returns what the console shows first to a key, once it counts this refusal and so those before it.

    A gateway reports its traffic every second, all of it at once.
    """
    with client.stream("GET", CONSOLE) as stream:
        snapshots = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        return masked(next(one for one in snapshots if last_refusal in one["traffic"]["refusals"]))


def metrics(service: RunningService) -> dict[str, float | None]:
    """Returns the service's metrics once they rest; None instead of those that vary between runs of one service.

    Ray shows a gauge only for a moment after it was set, so the metrics are read again and again.
    """
    shown: dict[str, float] = {}
    unchanged, deadline = 0, time.monotonic() + PATIENCE_S
    while unchanged < 3 * WATCH_S / METRICS_S:
        assert time.monotonic() < deadline, "the metrics do not rest"
        time.sleep(METRICS_S)
        before, shown = shown, shown | scraped(service)
        unchanged = unchanged + 1 if before == shown else 0
    assert any(name.startswith("privmix_tokens_total") for name in shown), "tokens are counted"
    return {name: None if METRICS_VARY.match(name) else value for name, value in shown.items()}


def scraped(service: RunningService) -> dict[str, float]:
    """Returns the service's metrics from Ray's agent, by name and labels. Values of several processes add up."""
    (agent,) = (process for process in service.tree() if " ".join(process.cmdline()).startswith("ray::DashboardAgent"))
    ports = {one.laddr.port for one in agent.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    sums: dict[str, float] = {}
    for port in ports:
        with suppress(httpx.HTTPError):  # the agent has other ports, too
            for line in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text.splitlines():
                if own := re.fullmatch(r"ray_(privmix_\w+)\{(.*)\} (\S+)", line):
                    labels = dict(re.findall(r'(\w+)="([^"]*)"', own[2]))
                    shown = {label: value for label, value in labels.items() if not RAYS_LABELS.fullmatch(label)}
                    place = f"{own[1]} {json.dumps(shown, sort_keys=True)}"
                    sums[place] = sums.get(place, 0.0) + float(own[3])
    return sums


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_every_route_is_documented_or_driven() -> None:
    with app_client() as client:
        assert isinstance(client.app, FastAPI)
        hidden = {route.path for route in client.app.routes if isinstance(route, Route) and not route.include_in_schema}
        documented = client.get("/openapi.json").json()["paths"]
    assert hidden == set(UNDOCUMENTED)
    assert {path for path, _ in REQUESTS} <= documented.keys()
    assert CONSOLE in documented


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_client_sees_the_same_of_neighbouring_ensembles(looks: list[Looks]) -> None:
    (first, ledger), (second, other) = looks
    assert "\n".join(unequal(first, second)) == ""
    for balance in (ledger, other):
        assert sum(balance.charged.values()) > 3 * HORIZON, "no token was refused"
        assert max(balance.accounts.charged) > 0
    assert ledger.accounts.charged != other.accounts.charged, "the accounts differ, and nothing that a client sees"
