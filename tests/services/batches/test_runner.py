"""Claim: whatever fails in a line fails this line alone; charged tokens are delivered, or named in the error file."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privmix.batches import runner
from privmix.batches.lines import Line
from privmix.batches.records import Batch, File, LineResponse, LineResult, new_id
from privmix.batches.runner import Runner, RunningBatch, _AnswerLostError
from privmix.batches.settings import BatchSettings
from privmix.batches.store import Answered, BatchStore
from privmix.database.service import ServiceDatabase
from privmix.foundation.errors import FilesUnavailable
from privmix.requests.errors import ApiError, unavailable

pytestmark = pytest.mark.anyio

OWNER, HOLDER, PROMPT = "key_a", "this", 3


class Answers(Runner):
    """A runner whose answers are drawn: it counts the tokens that a coordinator would have charged, by line."""

    charged: Counter[str]
    runs: Counter[str]

    async def _answer(self, job: RunningBatch, line: Line) -> tuple[LineResult, tuple[int, int]]:
        model, asked = (json.loads(line.body).get(field) for field in ("model", "prompt"))
        self.runs[line.custom_id] += 1
        await asyncio.sleep(0)
        if not isinstance(model, str):
            raise ApiError(400, "model: must be text", code="invalid_type", param="model")
        if asked == "waits" and self.runs[line.custom_id] == 1:
            raise unavailable("busy", headers={"retry-after": "0"})
        if asked == "stalls":
            raise unavailable("no token was generated in time", "stalled")
        tokens = len(line.custom_id)
        self.charged[line.custom_id] += tokens
        if asked == "lost":
            raise _AnswerLostError(unavailable("the coordinator died"), (PROMPT, tokens))
        body: dict[str, Any] = {"usage": {"completion_tokens": tokens}, "text": "\ud83d" if asked == "half" else "x"}
        if asked == "unwritable":
            body["text"] = float("nan")
        response = LineResponse(status_code=200, request_id=new_id("req_"), body=body)
        return LineResult(id=new_id("batch_req_"), custom_id=line.custom_id, response=response), (PROMPT, tokens)


CUSTOM_IDS = ("caf\u00e9 \ud83d", "\udc00", "\x00", "\u2028", "\U0001f600", "plain")
MODELS: tuple[Any, ...] = ("privmix", "priv\ud83dmix", "\x00", "x" * 10**5, ["privmix"], {}, None, 7)
PROMPTS: tuple[Any, ...] = ("x", "waits", "stalls", "lost", "half", "unwritable", "\ud83d", [], None)


def random_lines(chance: random.Random) -> list[dict[str, Any]]:
    fixed = chance.choice((None, *MODELS))  # all lines of a file may name one model
    return [
        {
            "custom_id": f"{number} {chance.choice(CUSTOM_IDS)}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": fixed or chance.choice(MODELS), "prompt": chance.choice(PROMPTS)},
        }
        for number in range(chance.randint(1, 30))
    ]


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    store = BatchStore(ServiceDatabase(str(tmp_path / "keys.db")), str(tmp_path / "files"))
    assert store.take_lease(HOLDER, 3000)
    return store


def answering(store: BatchStore, max_body_bytes: int = 1 << 20) -> Answers:
    nothing: Any = None
    answers = Answers(store, BatchSettings(), nothing, nothing, nothing, 4, HOLDER, max_body_bytes)
    answers.charged, answers.runs = Counter(), Counter()
    return answers


def put(store: BatchStore, lines: list[dict[str, Any]]) -> Batch:
    content, now = "\n".join(json.dumps(line) for line in lines).encode(), int(time.time())
    later = now + 86_400
    file = File(id=new_id("file-"), bytes=len(content), created_at=now, expires_at=later, filename="f", purpose="batch")
    store.put_file(OWNER, file, content, 10**9, 10**3)
    batch = Batch(
        id=new_id("batch_"),
        endpoint="/v1/completions",
        input_file_id=file.id,
        completion_window="24h",
        created_at=now,
        expires_at=later,
    )
    store.put_batch(OWNER, batch, None, 50)
    return batch


async def run(answers: Answers, store: BatchStore) -> None:
    (open_batch,) = store.open_batches()
    answers.start(open_batch)
    while answers._running:
        await asyncio.gather(*answers._running)


def written(store: BatchStore, file_id: str | None) -> dict[str, Any]:
    """Returns the lines of a file by their custom ids, as a client reads them."""
    lines = [] if file_id is None else [json.loads(line) for line in store.content(OWNER, file_id).splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


class Faults:
    """A place of contents that fails at first, and then at random, before or after it wrote."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.failures = 0

    def wrapped(self, write: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
        def failing(id_: str, content: bytes) -> None:
            fault = self._chance.choice((None, None, "before", "after") if self.failures else ("before", "after"))
            if fault != "before":
                write(id_, content)
            if fault is not None:
                self.failures += 1
                raise FilesUnavailable("the place fails")

        return failing


@pytest.mark.parametrize("seed", range(30))
async def test_charged_tokens_are_delivered_or_named(
    store: BatchStore, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_RETRY_S", "LONGEST_RETRY_S"):
        monkeypatch.setattr(runner, name, 0.01)
    chance = random.Random(seed)
    lines = random_lines(chance)
    batch, answers = put(store, lines), answering(store)
    faults = Faults(chance)
    monkeypatch.setattr(store._contents, "write", faults.wrapped(store._contents.write))
    await run(answers, store)
    assert faults.failures
    done = store.batch(OWNER, batch.id)
    assert done.status == "completed"
    delivered, failed = (written(store, file) for file in (done.output_file_id, done.error_file_id))
    assert delivered.keys() | failed.keys() == {line["custom_id"] for line in lines}
    assert not delivered.keys() & failed.keys()
    named = {
        custom_id: line["response"]["body"].get("usage", {"completion_tokens": 0})["completion_tokens"]
        for custom_id, line in (delivered | failed).items()
    }
    assert +Counter(named) == answers.charged
    assert done.usage is not None
    assert done.usage.output_tokens == answers.charged.total()
    assert (done.request_counts.completed, done.request_counts.failed) == (len(delivered), len(failed))
    store.delete_file(OWNER, batch.input_file_id)
    store.purge(int(time.time()) + 3700, 86_400)
    assert store._contents.ids() == {done.output_file_id, done.error_file_id} - {None}


async def test_a_line_whose_cost_nobody_knows_is_not_repeated_for_ever(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_RETRY_S", "LONGEST_RETRY_S"):
        monkeypatch.setattr(runner, name, 0.01)
    body = {"model": "privmix", "prompt": "stalls"}
    put(store, [{"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}])
    answers = answering(store)
    await asyncio.wait_for(run(answers, store), 60)
    assert answers.runs["one"] == runner.MAX_ATTEMPTS


async def test_an_answered_line_is_stored_although_its_batch_is_abandoned(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are charged, so another attempt would charge them again."""
    lines = [line | {"body": {"model": "privmix", "prompt": "x"}} for line in random_lines(random.Random(2))]
    batch, answers, write = put(store, lines), answering(store), store._contents.write

    def abandoning(id_: str, content: bytes) -> None:
        write(id_, content)
        loop.call_soon_threadsafe(answers.abandon)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(store._contents, "write", abandoning)
    await run(answers, store)
    assert store.batch(OWNER, batch.id).status == "in_progress"
    stored = store.answered(batch.id)
    assert {lines[number - 1]["custom_id"] for number in stored} == answers.charged.keys()
    monkeypatch.undo()
    before, again = answers.charged, answering(store)
    await run(again, store)
    assert not before.keys() & again.charged.keys()
    assert len(before) + len(again.charged) == len(lines)


async def test_results_take_no_more_than_the_place_of_their_key(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of the public model cost no budget, so nothing else bounds them."""
    lines = [
        {**line, "body": {"model": "privmix", "prompt": "x"}}
        for seed in range(4)
        for line in random_lines(random.Random(seed))
    ]
    lines = [{**line, "custom_id": f"{number} plain"} for number, line in enumerate(lines)]
    batch, answers = put(store, lines), answering(store)
    most = store.stored("key_a") + 1_000
    monkeypatch.setattr(answers, "_settings", BatchSettings(max_stored_bytes=most))
    await run(answers, store)
    done = store.batch(OWNER, batch.id)
    delivered, failed = (written(store, file) for file in (done.output_file_id, done.error_file_id))
    assert answers.charged.keys() == delivered.keys(), "what is refused is not generated"
    assert delivered
    assert {line["response"]["body"]["error"]["code"] for line in failed.values()} == {"storage_full"}
    assert len(delivered) + len(failed) == len(lines)


async def test_a_line_is_no_larger_than_a_request(store: BatchStore) -> None:
    """A body of the largest size in the file is accepted, however it would be written again."""
    text = "\u00e9" * 1_000
    bodies = {"large": {"model": "privmix", "prompt": "x" + text}, "good": {"model": "privmix", "prompt": text}}
    lines = [
        {"custom_id": id_, "method": "POST", "url": "/v1/completions", "body": body} for id_, body in bodies.items()
    ]
    limit = len(json.dumps(bodies["good"], ensure_ascii=False, separators=(",", ":")).encode())
    batch, answers = put(store, lines), answering(store, limit)
    await run(answers, store)
    done = store.batch(OWNER, batch.id)
    assert written(store, done.output_file_id).keys() == answers.runs.keys() == {"good"}
    refused = written(store, done.error_file_id)["large"]["response"]
    error = refused["body"]["error"]
    assert (refused["status_code"], error["code"], error["param"]) == (413, "body_too_large", "body")


async def test_a_batch_with_an_unwritable_custom_id_can_be_cancelled(store: BatchStore) -> None:
    batch = put(store, [line | {"custom_id": f"{line['custom_id']}\ud83d"} for line in random_lines(random.Random(1))])
    store.change(batch.id, status="cancelling")
    answers = answering(store)
    await run(answers, store)
    done = store.batch(OWNER, batch.id)
    assert (done.status, answers.charged) == ("cancelled", {})
    assert {line["error"]["code"] for line in written(store, done.error_file_id).values()} == {"batch_cancelled"}


@pytest.mark.parametrize("answered", [0, 1])
async def test_a_batch_whose_input_is_lost_ends_with_what_was_answered(store: BatchStore, answered: int) -> None:
    batch = put(store, random_lines(random.Random(1)))
    for number in range(1, answered + 1):
        store.begin_line(batch.id, number, HOLDER)
        response = LineResponse(status_code=200, request_id="req_1", body={})
        result = LineResult(id="1", custom_id="a", response=response)
        store.answer_lines(OWNER, batch.id, [Answered(number, result, (4, 2))])
    store._contents.delete(batch.input_file_id)
    await run(answering(store), store)
    done = store.batch(OWNER, batch.id)
    assert done.errors is not None
    assert [error.code for error in done.errors.data] == ["file_content_lost"]
    assert done.status == ("expired" if answered else "failed")
    assert len(written(store, done.output_file_id)) == answered
    assert (done.usage.output_tokens if done.usage else 0) == 2 * answered
