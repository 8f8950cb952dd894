"""Claim: the running service answers the unmodified `openai` client and charges exactly the released tokens."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from privmix.gateway.served_model import PromptTokenizer
from tests.conftest import SERVED_CONTEXT
from tests.running import PLANTED_HOST, RunningService, configure_small, running, settled
from tests.support.clients import CHAT, client_of, costs

PROMPT = "The patient called because"
SECRET = "Wilhelmina"
LONG = SERVED_CONTEXT - 100
"""The tokens of answers that take much longer than their requests."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def client(service: RunningService) -> openai.OpenAI:
    return client_of(service)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": "privmix", "prompt": PROMPT, "max_tokens": 12, **fields})


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "privmix", "messages": CHAT, "max_tokens": 12, **fields})


def test_the_settings_of_the_environment_reach_no_actor_and_its_children(service: RunningService) -> None:
    sent = httpx.get(f"{service.base_url}/v1/models", headers={"host": PLANTED_HOST}, timeout=60)
    assert sent.is_success, "the service has the setting"
    command, *others = service.tree()
    assert PLANTED_HOST in str(command.environ())
    titles = [" ".join(process.cmdline()) for process in others]
    for actor in ("Budget", "Keys", "Coordinator", "Shard", "Fleet", "ServeReplica"):
        assert any(title.startswith("ray::") and actor in title for title in titles)
    for process in others:
        with suppress(psutil.NoSuchProcess):
            assert PLANTED_HOST not in str(process.environ())


def test_a_stream_is_sent_while_it_is_generated(client: openai.OpenAI) -> None:
    stream = ask(client, stream=True, max_tokens=64, n=2)
    assert sum(1 for _ in stream.response.iter_raw()) > 8


def test_a_chat_is_answered_and_streamed(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert isinstance(answer.choices[0].message.content, str)
    assert 1 <= answer.usage.completion_tokens <= 12
    first, *rest = [chunk.choices[0] for chunk in chat(client, stream=True)]
    assert first.delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in (first, *rest))
    assert rest[-1].finish_reason in ("stop", "length")


def test_choices_of_several_prompts_are_all_charged(service: RunningService, client: openai.OpenAI) -> None:
    before = settled(service)
    answer = ask(client, prompt=[PROMPT, "The nurse said"], n=3, max_tokens=6)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert 6 <= answer.usage.completion_tokens <= 36
    costs(service, before, answer.usage.completion_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_answer_and_the_charges(
    service: RunningService, client: openai.OpenAI, stream: bool
) -> None:
    stop = ["e", " a", "\n", "o"]
    before = settled(service)
    answer = ask(client, max_tokens=200, stop=stop, stream=stream, **(_usage() if stream else {}))
    if stream:
        *pieces, last = list(answer)
        assert len({(piece.id, piece.created, piece.model) for piece in (*pieces, last)}) == 1
        assert last.choices == []
        text = "".join(piece.choices[0].text for piece in pieces)
        reason, usage = pieces[-1].choices[0].finish_reason, last.usage
    else:
        text, reason, usage = answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
    assert reason == "stop"
    assert not any(string in text for string in stop)
    assert usage.completion_tokens < 200
    costs(service, before, usage.completion_tokens)


def _usage() -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}}


def test_prompt_and_answer_may_fill_the_context_exactly(client: openai.OpenAI) -> None:
    prompt = [504] * (SERVED_CONTEXT - 2)
    answer = ask(client, prompt=prompt, max_tokens=2)
    assert answer.usage.prompt_tokens == len(prompt)
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, prompt=prompt, max_tokens=3)
    assert (refusal.value.param, refusal.value.code) == ("max_tokens", "context_length_exceeded")


def test_an_abandoned_stream_is_charged_no_further(service: RunningService, client: openai.OpenAI) -> None:
    before = settled(service)
    stream = ask(client, stream=True, max_tokens=LONG, n=4)
    next(iter(stream))
    stream.close()
    assert settled(service) - before < 2 * LONG


def test_an_abandoned_request_is_charged_no_further(service: RunningService, client: openai.OpenAI) -> None:
    before = settled(service)
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=1.0), max_tokens=LONG, n=8)
    assert settled(service) - before < 4 * LONG


def test_the_service_reports_models_health_and_statement(service: RunningService, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["privmix"]
    assert client.models.retrieve("privmix").owned_by == "privmix"
    health = httpx.get(f"{service.base_url}/health", timeout=60).json()
    assert health == {"status": "ok", "missing": [], "troubles": {}}
    statement = service.privacy()
    assert statement["epsilon"] == 8.0
    assert statement["delta"] == 1e-5
    assert 0 <= statement["epsilon_spent"] <= statement["epsilon"]
    assert not {"ledger", "head", "charges", "ensemble"} & statement.keys()


def logs(service: RunningService) -> str:
    """Returns the logs of the service and Ray. The command lines of Ray's processes name the session's directory."""
    lines = " ".join(" ".join(process.cmdline()) for process in service.tree())
    sessions = {Path(path) for path in re.findall(r"(/[^ =:]*/session_[0-9_-]+)/", lines)}
    assert sessions
    files = [file for session in sessions for file in (session / "logs").rglob("*") if file.is_file()]
    return "\n".join(file.read_text(errors="replace") for file in (service.config.with_suffix(".log"), *files))


def test_the_logs_contain_no_private_text(
    service: RunningService, client: openai.OpenAI, prompts: PromptTokenizer
) -> None:
    prompt = f"{SECRET} called because"
    (tokens,) = asyncio.run(prompts.tokens([prompt], 8192))
    answer = ask(client, prompt=prompt, user=SECRET, max_tokens=48)
    httpx.get(f"{service.base_url}/v1/{SECRET}?q={SECRET}", timeout=60)
    log = logs(service)
    assert answer.id in log
    assert SECRET not in log
    text = max(answer.choices[0].text.splitlines(), key=len)
    assert len(text) > 20
    assert text not in log
    for separator in (", ", ",", " "):
        assert separator.join(map(str, tokens)) not in log


def test_a_request_has_one_log_line_in_json(service: RunningService, client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="privmix", prompt=PROMPT, max_tokens=5)
    answer = raw.parse()
    (line,) = [json.loads(line) for line in logs(service).splitlines() if answer.id in line]
    assert line["levelname"] == "INFO"
    assert line["asctime"]
    assert line["request_id"] == raw.headers["x-request-id"]
    assert (line["http.request.method"], line["http.route"]) == ("POST", "/v1/completions")
    assert line["http.response.status_code"] == 200
    assert answer.usage is not None
    assert line["privmix.completion_tokens"] == answer.usage.completion_tokens
    assert line["privmix.key"] == "anonymous"
    assert 0 < line["privmix.seconds"] < 300


def test_requests_in_close_succession_are_all_answered(client: openai.OpenAI) -> None:
    """A coordinator returns its lease when it becomes idle. A request at that moment must not be lost."""
    for _ in range(40):
        assert ask(client, max_tokens=1).usage.completion_tokens == 1


TOKENS = 24


@pytest.fixture
def small(tmp_path: Path) -> Iterator[RunningService]:
    """A service with a budget of `TOKENS` tokens."""
    budget = {"lease_tokens": 8, "when_exhausted": "refuse"}
    with running(configure_small(tmp_path, privacy={"q": 1.0, "tokens": TOKENS}, budget=budget)) as service:
        yield service


@pytest.mark.slow
def test_a_budget_ends_in_the_middle_of_a_stream_and_then_refuses(small: RunningService) -> None:
    client = client_of(small)
    received = 0
    limit = None
    while limit != "privacy_budget":
        *pieces, last = list(ask(client, stream=True, max_tokens=190, **_usage()))
        limit = (pieces[-1].model_extra or {}).get("privmix", {}).get("ended_by")
        assert pieces[-1].choices[0].finish_reason in ("stop", "length")
        assert last.usage.completion_tokens > 0
        received += last.usage.completion_tokens
    assert received == settled(small) == TOKENS
    assert small.privacy()["tokens_left"] == 0

    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as refusal:
            ask(client, stream=stream)
        assert (refusal.value.code, refusal.value.status_code) == ("privacy_budget_exhausted", 429)
        assert refusal.value.response.headers["x-should-retry"] == "false"
    assert settled(small) == TOKENS
