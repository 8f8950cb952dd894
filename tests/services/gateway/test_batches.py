"""Claim: OpenAI's client can use files and batches, and invalid requests are refused before anything is stored."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from privmix.batches.settings import BatchSettings
from privmix.database.service import ServiceDatabase, default_database
from privmix.gateway.batches import BatchRoutes
from privmix.keys.records import Share
from privmix.keys.store import KeyStore
from tests.running import RunningService, configure, own_ensemble, running, settled
from tests.support.app import MakeClient, app_client

MARK = "Wilhelmina"
MAX_BYTES = 4096


@pytest.fixture(scope="module")
def batch_client() -> Iterator[TestClient]:
    """Provides a client of a gateway with batches enabled but without a batches actor."""
    with app_client(BatchSettings(max_file_bytes=MAX_BYTES), batches_actor="batches") as client:
        yield client


def refusal(response: Any) -> tuple[int, str, str | None]:
    assert MARK not in response.text
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def upload(client: TestClient, content: bytes = MARK.encode(), fields: dict[str, str] | None = None) -> Any:
    return client.post("/v1/files", files={"file": (MARK, content)}, data={"purpose": "batch", **(fields or {})})


def test_a_service_without_batches_refuses_them(client: TestClient) -> None:
    assert refusal(upload(client)) == (404, "batches_not_kept", None)
    assert refusal(client.get("/v1/batches")) == (404, "batches_not_kept", None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (503, "service_unavailable", None)),
        ({"purpose": "fine-tune"}, (400, "invalid_value", "purpose")),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "10"},
            (400, "invalid_value", "expires_after"),
        ),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}, (503, "service_unavailable", None)),
    ],
)
def test_uploads_are_validated(
    batch_client: TestClient, fields: dict[str, str], expected: tuple[int, str, str | None]
) -> None:
    assert refusal(upload(batch_client, fields=fields)) == expected


def test_a_file_over_the_limit_is_refused(batch_client: TestClient) -> None:
    for size in (MAX_BYTES + 1, 100 * MAX_BYTES):
        assert refusal(upload(batch_client, b"x" * size)) == (413, "file_too_large", "file")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"json": {"file": MARK}}, (415, "unsupported_media_type", "file")),
        ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, (400, "missing_required_parameter", "file")),
        (
            {"content": MARK, "headers": {"content-type": "multipart/form-data; boundary=b"}},
            (400, "missing_required_parameter", "file"),
        ),
        ({"content": MARK, "headers": {"content-type": "multipart/form-data"}}, (400, "invalid_body", "body")),
    ],
)
def test_an_upload_without_a_file_is_refused(
    batch_client: TestClient, request_: dict[str, Any], expected: tuple[int, str, str | None]
) -> None:
    status, code, param = refusal(batch_client.post("/v1/files", **request_))
    assert status == expected[0]
    assert (code, param) == expected[1:] or code == "invalid_body"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (503, "service_unavailable", None)),
        ({"endpoint": "/v1/embeddings"}, (400, "invalid_value", "endpoint")),
        ({"completion_window": "soon"}, (400, "invalid_value", "completion_window")),
        ({"completion_window": "0h"}, (400, "invalid_value", "completion_window")),
        ({"input_file_id": None}, (400, "missing_required_parameter", "input_file_id")),
        ({"metadata": {"a": 1}}, (400, "invalid_type", "metadata.a")),
        ({"metadata": {"a": "x" * 513}}, (400, "invalid_value", "metadata")),
        ({"unknown": 1}, (400, "unknown_parameter", "unknown")),
    ],
)
def test_a_batch_is_validated(
    batch_client: TestClient, changes: dict[str, Any], expected: tuple[int, str, str | None]
) -> None:
    body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert refusal(batch_client.post("/v1/batches", json={**body, **changes})) == expected


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=100000"])
def test_page_limits_are_validated(batch_client: TestClient, query: str) -> None:
    for path in ("/v1/files", "/v1/batches"):
        assert refusal(batch_client.get(f"{path}?{query}")) == (400, "invalid_value", "limit")


PROMPT = f"{MARK} called because"


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"model": "privmix", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **changes}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.fixture(scope="module")
def shared(ensemble: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("batches")
    config = configure(folder, own_ensemble(ensemble, folder), coordinator={"max_live": 4})
    with running(config) as service:
        yield service


@pytest.fixture(scope="module")
def store(shared: RunningService) -> KeyStore:
    return KeyStore(ServiceDatabase(default_database(str(shared.ledger))))


def client_of(service: RunningService, store: KeyStore, name: str, **share: int) -> openai.OpenAI:
    _, secret = store.create(name, share=Share(**share))
    return openai.OpenAI(base_url=f"{service.base_url}/v1", api_key=secret.text, max_retries=0, timeout=120)


def create(client: openai.OpenAI, *lines: dict[str, Any], window: Any = "24h") -> Any:
    file = client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window=window, metadata={"for": "tests"}
    )


def completed(client: openai.OpenAI, batch_id: str) -> int:
    """Returns the number of lines with an answer."""
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def ended(client: openai.OpenAI, batch_id: str, seconds: float = 180) -> Any:
    deadline = time.monotonic() + seconds
    while (batch := client.batches.retrieve(batch_id)).status in (
        "validating",
        "in_progress",
        "finalizing",
        "cancelling",
    ):
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    return batch


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_openai_client_can_use_the_complete_api(shared: RunningService, store: KeyStore) -> None:
    client, other = client_of(shared, store, "team", tokens=1000), client_of(shared, store, "other")
    before = settled(shared, httpx.Client(headers={"authorization": f"Bearer {client.api_key}"}))
    batch = create(client, line(1), line(2, temperature=0), line(3), line(4, n=2), line(5, stream=True))
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"for": "tests"})
    done = ended(client, batch.id)
    assert (done.status, done.model) == ("completed", "privmix")
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (5, 3, 2)
    answers = {line["custom_id"]: line["response"] for line in lines_of(client, done.output_file_id)}
    assert list(answers) == ["line-1", "line-3", "line-4"]
    assert [len(answer["body"]["choices"]) for answer in answers.values()] == [1, 1, 2]
    assert all(choice["text"] for answer in answers.values() for choice in answer["body"]["choices"])
    refused = {line["custom_id"]: line["response"] for line in lines_of(client, done.error_file_id)}
    assert {id_: answer["body"]["error"]["param"] for id_, answer in refused.items()} == {
        "line-2": "temperature",
        "line-5": "stream",
    }
    spent = sum(answer["body"]["usage"]["completion_tokens"] for answer in answers.values())
    assert done.usage.output_tokens == spent == 16
    assert store.account("team").usage.spent == spent
    with httpx.Client(headers={"authorization": f"Bearer {client.api_key}"}) as http:
        assert settled(shared, http) == before + spent

    assert [listed.id for listed in client.batches.list()] == [batch.id]
    assert {file.id for file in client.files.list()} == {done.input_file_id, done.output_file_id, done.error_file_id}
    assert [*other.files.list(), *other.batches.list()] == []
    foreign: list[tuple[Callable[[str], object], str]] = [
        *((method, done.input_file_id) for method in (other.files.retrieve, other.files.content, other.files.delete)),
        *((method, batch.id) for method in (other.batches.retrieve, other.batches.cancel)),
    ]
    for method, id_ in foreign:
        with pytest.raises(openai.NotFoundError):
            method(id_)
    assert client.files.retrieve(done.input_file_id).purpose == "batch"
    assert client.files.delete(done.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(done.input_file_id)
    for log in shared.config.parent.glob("*.log"):
        assert MARK not in log.read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_batch_with_an_invalid_file_reports_the_errors(shared: RunningService, store: KeyStore) -> None:
    client = client_of(shared, store, "careless")
    failed = ended(client, create(client, line(1), line(1)).id)
    assert failed.status == "failed"
    assert [(error.code, error.line) for error in failed.errors.data] == [("duplicate_custom_id", 2)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_share_ends_a_batch_exactly(shared: RunningService, store: KeyStore) -> None:
    client = client_of(shared, store, "poor", tokens=10)
    done = ended(client, create(client, *(line(number) for number in range(6))).id)
    assert done.status == "completed"
    assert store.account("poor").usage.spent == 10
    assert done.usage.output_tokens == 10
    codes = {line["response"]["body"]["error"]["code"] for line in lines_of(client, done.error_file_id)}
    assert codes == {"share_exhausted"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_charged_tokens_are_delivered_or_named(shared: RunningService, store: KeyStore) -> None:
    """Random lines: valid ones, refused ones, and ones with names that no text can hold."""
    chance, client = random.Random(7), client_of(shared, store, "various", tokens=60)
    names = ("caf\u00e9", "\ud83d", "\x00", "\u2028")
    lines = [
        line(number, **chance.choice(({}, {}, {"model": ["privmix"]}, {"max_tokens": -1}, {"prompt": "\ud83d"})))
        | {"custom_id": f"{number} {chance.choice(names)}"}
        for number in range(24)
    ]
    batch = create(client, *lines)
    done = ended(client, batch.id)
    assert done.status == "completed"
    delivered, failed = lines_of(client, done.output_file_id), lines_of(client, done.error_file_id)
    assert sorted(each["custom_id"] for each in [*delivered, *failed]) == sorted(each["custom_id"] for each in lines)
    assert delivered
    assert failed
    named = sum(
        each["response"]["body"].get("usage", {"completion_tokens": 0})["completion_tokens"]
        for each in [*delivered, *failed]
    )
    assert named == done.usage.output_tokens == store.account("various").usage.spent
    client.files.delete(batch.input_file_id)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cancelled_batch_keeps_its_answers(shared: RunningService, store: KeyStore) -> None:
    client = client_of(shared, store, "hasty")
    batch = create(client, *(line(number, max_tokens=16) for number in range(40)))
    while completed(client, batch.id) < 2:
        time.sleep(0.1)
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(client, batch.id)
    assert done.status == "cancelled"
    answers, missing = lines_of(client, done.output_file_id), lines_of(client, done.error_file_id)
    assert 2 <= len(answers) < 40
    assert len(answers) + len(missing) == 40
    assert {line["error"]["code"] for line in missing} == {"batch_cancelled"}
    assert store.account("hasty").usage.spent == 16 * len(answers), "every charged line has its answer"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_restart_charges_no_answer_twice(shared: RunningService, store: KeyStore) -> None:
    client = client_of(shared, store, "patient")
    batch = create(client, *(line(number, max_tokens=16) for number in range(16)))
    while completed(client, batch.id) < 4:
        time.sleep(0.1)
    shared.kill("Batches")
    deadline = time.monotonic() + 180
    while True:
        try:
            done = client.batches.retrieve(batch.id)
        except openai.InternalServerError:
            done = None
        if done is not None and done.status == "completed":
            break
        assert time.monotonic() < deadline
        time.sleep(0.5)
    answers = lines_of(client, done.output_file_id)
    assert [line["custom_id"] for line in answers] == [f"line-{number}" for number in range(16)]
    usage = store.account("patient").usage
    running_lines = 2  # half of `max_live`
    assert 16 * 16 <= usage.charged <= 16 * (16 + running_lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interactive_requests_go_before_batches(shared: RunningService, store: KeyStore) -> None:
    client, person = client_of(shared, store, "offline"), client_of(shared, store, "person")
    batch = create(client, *(line(number, max_tokens=32) for number in range(60)))
    while not completed(client, batch.id):
        time.sleep(0.1)
    for _ in range(3):
        person.completions.create(model="privmix", prompt=PROMPT, max_tokens=4)
    assert client.batches.retrieve(batch.id).status == "in_progress", (
        "the interactive requests did not wait for the batch"
    )
    client.batches.cancel(batch.id)
    ended(client, batch.id)


def test_the_changes_of_one_key_are_limited_and_those_of_others_are_not(make_client: MakeClient) -> None:
    limits = BatchSettings(changes_per_minute=3)
    client = make_client(batches=limits, batches_actor="batches", api_keys=("hers", "his"))
    hers, his = ({"authorization": f"Bearer {key}"} for key in ("hers", "his"))
    body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    changes = [
        client.delete("/v1/files/file-1", headers=hers),
        client.post("/v1/batches", json=body, headers=hers),
        client.post("/v1/files", content=b"", headers=hers),
        client.post("/v1/files", content=b"", headers=hers),
    ]
    assert [answer.status_code for answer in changes] == [503, 503, 415, 429]
    assert changes[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(changes[-1].headers["retry-after"]) <= 20
    assert client.get("/v1/files", headers=hers).status_code == 503, "reading is not limited"
    assert client.delete("/v1/files/file-1", headers=his).status_code == 503


@pytest.mark.anyio
async def test_a_key_uploads_two_files_at_a_time(make_client: MakeClient) -> None:
    app = make_client(batches_actor="batches", api_keys=("hers", "his")).app
    started, going = asyncio.Semaphore(0), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        started.release()
        await going.wait()
        yield b"--b--"

    def upload(http: httpx.AsyncClient, key: str) -> asyncio.Task[httpx.Response]:
        headers = {"authorization": f"Bearer {key}", "content-type": "multipart/form-data; boundary=b"}
        return asyncio.create_task(http.post("/v1/files", content=slow(), headers=headers))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        running = [upload(http, key) for key in ("hers", "hers", "his")]
        for _ in running:
            await started.acquire()
        refused = await upload(http, "hers")
        going.set()
        ended = await asyncio.gather(*running)
        again = await upload(http, "hers")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_uploads")
    assert [answer.status_code for answer in (*ended, again)] == [400] * 4, "they have no file"


@pytest.mark.anyio
async def test_a_key_downloads_two_files_at_a_time(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download has its place until it is sent, or its client has left."""
    app = make_client(batches_actor="batches", api_keys=("hers", "his")).app
    started = asyncio.Semaphore(0)

    async def content(*_: object) -> bytes:
        return b"{}"

    async def blocked(message: Message) -> None:
        if message["type"] == "http.response.body":
            started.release()
            await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    def stuck(key: str) -> asyncio.Task[None]:
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        request = {"type": "http", "method": "GET", "path": "/v1/files/a/content", "query_string": b""}
        scope = {**request, "headers": headers, "client": None}
        return asyncio.ensure_future(app(scope, receive, blocked))

    monkeypatch.setattr(BatchRoutes, "_ask_for", content)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:

        async def downloaded(key: str) -> httpx.Response:
            return await http.get("/v1/files/a/content", headers={"authorization": f"Bearer {key}"})

        running = [stuck("hers"), stuck("hers")]
        for _ in running:
            await asyncio.wait_for(started.acquire(), 10)
        refused, other = await downloaded("hers"), await downloaded("his")
        running[0].cancel()
        await asyncio.gather(running[0], return_exceptions=True)
        again = [await downloaded("hers") for _ in range(3)]
        running[1].cancel()
        await asyncio.gather(running[1], return_exceptions=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_downloads")
    assert [answer.text for answer in (other, *again)] == ["{}"] * 4
