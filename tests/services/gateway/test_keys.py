"""Claim: keys control access over HTTP, and no share is overspent by even one token."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
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
from privmix.keys.records import Share, ShareUsage
from privmix.privacy.mollifiers.shaping import SamplingOptions
from tests.ensembles import write_ensemble
from tests.key_store import RequestStore
from tests.running import RunningService, configure, running, settled
from tests.support.app import MakeClient
from tests.support.cli import privmix

PROMPT = "The patient called because"
KEYS, CLIENTS, SHARE = 10, 50, 24


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


class Guarded:
    """Holds a running service, the database of its keys, and a client with a key."""

    def __init__(self, service: RunningService, store: RequestStore, secret: str) -> None:
        self.service = service
        self.store = store
        self.url = service.base_url
        self.http = httpx.Client(base_url=service.base_url, headers={"authorization": f"Bearer {secret}"}, timeout=120)

    def create(self, name: str, share: Share | None = None) -> str:
        _, secret = self.store.create(name, share=share)
        return secret.text

    def usage(self, name: str) -> ShareUsage:
        return self.store.account(name).usage

    def ask(self, secret: str, **fields: Any) -> Any:
        body = {"model": "privmix", "prompt": PROMPT, "max_tokens": 6, "extra_body": {"ignore_eos": True}, **fields}
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=secret, max_retries=0, timeout=300)
        return client.completions.create(**body)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    ensemble = write_ensemble(folder / "ensemble", 2)
    # The capacity is smaller than the number of clients, so that requests queue.
    sections: dict[str, dict[str, Any]] = {
        "http": {"max_tokens": 200},
        "engine": {"kind": "transformers", "context_length": 256},
        "coordinator": {"max_live": 16},
    }
    store = RequestStore(ServiceDatabase(folder / "keys.db"))
    _, secret = store.create("reader", share=Share(tokens=0))
    with running(configure(folder, ensemble, **sections)) as service:
        yield Guarded(service, store, secret.text)


@pytest.mark.slow
def test_the_command_line_changes_the_running_service(guarded: Guarded) -> None:
    place = ("--database", str(guarded.service.ledger.with_name("keys.db")))
    secret = json.loads(privmix("keys", "create", "team", "--tokens", "5", *place, "--json").stdout)["secret"]
    answer = guarded.ask(secret, max_tokens=9)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")
    assert answer.model_extra["privmix"] == {"ended_by": "share"}
    with pytest.raises(openai.RateLimitError) as refused:
        guarded.ask(secret)
    assert refused.value.code == "share_exhausted"
    privmix("keys", "limit", "team", "--tokens", "8", *place)
    assert guarded.ask(secret, n=2).usage.completion_tokens == 3
    listed = json.loads(privmix("keys", "list", "--json", *place).stdout)
    assert [account["usage"]["spent"] for account in listed if account["key"]["name"] == "team"] == [8]
    rotated = json.loads(privmix("keys", "rotate", "team", "--json", *place).stdout)["secret"]
    time.sleep(IDENTITY_AGE_S)
    with pytest.raises(openai.AuthenticationError):
        guarded.ask(secret)
    with pytest.raises(openai.RateLimitError):
        guarded.ask(rotated)
    privmix("keys", "revoke", "team", *place)
    time.sleep(IDENTITY_AGE_S)
    with pytest.raises(openai.AuthenticationError, match="revoked"):
        guarded.ask(rotated)


@pytest.mark.slow
def test_fifty_concurrent_clients_on_ten_keys_spend_each_share_exactly(guarded: Guarded) -> None:
    names = [f"racer-{number}" for number in range(KEYS)]
    secrets = {name: guarded.create(name, Share(tokens=SHARE)) for name in names}
    before = settled(guarded.service, guarded.http)

    async def client(number: int) -> tuple[str, int, str]:
        name = names[number % KEYS]
        released = 0
        async with openai.AsyncOpenAI(
            base_url=f"{guarded.url}/v1", api_key=secrets[name], max_retries=0, timeout=600
        ) as session:
            while True:
                try:
                    answer = await session.completions.create(model="privmix", prompt=PROMPT, max_tokens=3 + number % 5)
                except openai.RateLimitError as error:
                    return name, released, str(error.code)
                assert answer.usage is not None
                released += answer.usage.completion_tokens

    async def run_all() -> list[tuple[str, int, str]]:
        return await asyncio.gather(*(client(number) for number in range(CLIENTS)))

    outcomes = asyncio.run(run_all())
    assert {code for *_, code in outcomes} == {"share_exhausted"}
    released = {name: sum(tokens for key, tokens, _ in outcomes if key == name) for name in names}
    usages = {name: guarded.usage(name) for name in names}
    assert released == dict.fromkeys(names, SHARE)
    assert {name: (usage.spent, usage.held) for name, usage in usages.items()} == dict.fromkeys(names, (SHARE, 0))
    assert settled(guarded.service, guarded.http) - before == KEYS * SHARE
