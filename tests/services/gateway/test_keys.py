"""Claim: keys control access over HTTP. `tests/services/keys` shows that no share is overspent by a token."""

import json
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from privmix.coordinator.messages import Generation
from privmix.database.service import ServiceDatabase
from privmix.gateway.admission import divide_tokens
from privmix.gateway.coordinator_client import CoordinatorClient
from privmix.gateway.errors import refusal, unavailable
from privmix.keys.actor import IDENTITY_AGE_S
from privmix.keys.messages import Refused
from privmix.keys.records import Share
from privmix.privacy.mollifiers.shaping import SamplingOptions
from tests.key_store import RequestStore
from tests.running import RunningService, configure_small, running
from tests.support.app import MakeClient
from tests.support.cli import privmix

PROMPT = "The patient called because"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(1, 200))
def test_tokens_are_divided_evenly_and_completely(limits: list[int], tokens: int) -> None:
    generations = [Generation(str(i), (1,), SamplingOptions(), limit) for i, limit in enumerate(limits)]
    shares = divide_tokens(generations, tokens)
    divided = [share.max_tokens if share.max_charged is None else share.max_charged for share in shares]
    assert sum(divided) == min(tokens, sum(limits))
    assert all(size <= limit for size, limit in zip(divided, limits, strict=True))
    unfilled = [size for size, limit in zip(divided, limits, strict=True) if size < limit]
    assert not unfilled or max(divided) - min(unfilled) <= 1


@pytest.mark.parametrize(
    ("refused", "status", "code", "retry"),
    [
        (Refused("share_exhausted"), 429, "share_exhausted", None),
        (Refused("live_streams", 2), 429, "too_many_streams", None),
        (Refused("overloaded", retry_after_s=1.2), 429, "overloaded", "2"),
        (Refused("request_too_large", 2), 400, "request_too_large", None),
    ],
)
def test_refusals_have_openais_status_and_code(refused: Refused, status: int, code: str, retry: str | None) -> None:
    error = refusal(refused, 3)
    assert (error.status, error.code, error.headers.get("retry-after")) == (status, code, retry)


pytestmark = pytest.mark.timeout(900)


def test_two_keys_never_share_a_cached_prefix(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared prefix answers sooner, so a key could test guesses of what another key has asked."""
    salts: list[str | None] = []

    def submit(self: CoordinatorClient, generations: Sequence[Generation], **_: Any) -> None:
        salts.extend(generation.cache_salt for generation in generations)
        raise unavailable("this test submits nothing")

    monkeypatch.setattr(CoordinatorClient, "submit", submit)
    secret = SecretStr("shared by all gateways")
    gateways = [make_client(api_keys=("hers", "his"), cache_secret=secret) for _ in range(2)]
    for gateway in gateways:
        for key in ("hers", "hers", "his"):
            fields = {"model": "privmix", "prompt": ["Hello", "Hello"], "max_tokens": 2}
            gateway.post("/v1/completions", json=fields, headers={"authorization": f"Bearer {key}"})
    hers, his = salts[0], salts[4]
    assert salts == 2 * [hers, hers, hers, hers, his, his]
    assert hers != his and None not in (hers, his)
    guessed = {sha256(text.encode()).hexdigest() for text in ("hers", "his", "api-key-1", "api-key-2")}
    assert not {hers, his} & guessed, "a client that knows a key's name knows its salt"


@pytest.mark.slow
def test_the_command_line_changes_the_running_service(tmp_path: Path) -> None:
    store = RequestStore(ServiceDatabase(tmp_path / "keys.db"))
    _, reader = store.create("reader", share=Share(tokens=0))
    with running(configure_small(tmp_path)) as service:
        follow(service, ("--database", str(tmp_path / "keys.db")))
        headers = {"authorization": f"Bearer {reader.text}"}
        assert httpx.get(f"{service.base_url}/v1/privacy", headers=headers, timeout=120).status_code == 200
        with pytest.raises(openai.RateLimitError):
            ask(service, reader.text)


def ask(service: RunningService, secret: str, **fields: Any) -> Any:
    body = {"model": "privmix", "prompt": PROMPT, "max_tokens": 6, "extra_body": {"ignore_eos": True}, **fields}
    client = openai.OpenAI(base_url=f"{service.base_url}/v1", api_key=secret, max_retries=0, timeout=300)
    return client.completions.create(**body)


def follow(service: RunningService, place: tuple[str, str]) -> None:
    """Makes, limits, rotates and revokes a key, and sees that each takes effect."""
    secret = json.loads(privmix("keys", "create", "team", "--tokens", "5", *place, "--json").stdout)["secret"]
    answer = ask(service, secret, max_tokens=9)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")
    assert answer.model_extra["privmix"] == {"ended_by": "share"}
    with pytest.raises(openai.RateLimitError) as refused:
        ask(service, secret)
    assert refused.value.code == "share_exhausted"
    privmix("keys", "limit", "team", "--tokens", "8", *place)
    assert ask(service, secret, n=2).usage.completion_tokens == 3
    listed = json.loads(privmix("keys", "list", "--json", *place).stdout)
    assert [account["usage"]["spent"] for account in listed if account["key"]["name"] == "team"] == [8]
    rotated = json.loads(privmix("keys", "rotate", "team", "--json", *place).stdout)["secret"]
    time.sleep(IDENTITY_AGE_S)
    with pytest.raises(openai.AuthenticationError):
        ask(service, secret)
    with pytest.raises(openai.RateLimitError):
        ask(service, rotated)
    privmix("keys", "revoke", "team", *place)
    time.sleep(IDENTITY_AGE_S)
    with pytest.raises(openai.AuthenticationError, match="revoked"):
        ask(service, rotated)
