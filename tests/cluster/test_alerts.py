"""Claim: a webhook gets the alerts of the running service."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from privmix.database.service import ServiceDatabase, default_database
from privmix.keys.records import Share
from privmix.keys.store import KeyStore
from privmix_cluster.cli import app
from tests.running import RunningService, configure, own_ensemble, running
from tests.services.alerts.receiver import Receiver, receiving

TOKENS = 96


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as started:
        yield started


@pytest.fixture
def watched(ensemble: Path, tmp_path: Path, receiver: Receiver) -> Iterator[RunningService]:
    config = configure(
        tmp_path,
        own_ensemble(ensemble, tmp_path),
        privacy={"tokens": TOKENS},
        budget={"lease_tokens": 4},
        alerts={"webhooks": [receiver.url], "thresholds": [0.5], "interval_s": 0.5, "patience_s": 2},
    )
    with running(config) as service:
        yield service


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_share_a_crash_and_the_end_of_the_budget_are_told(watched: RunningService, receiver: Receiver) -> None:
    store = KeyStore(ServiceDatabase(default_database(str(watched.ledger))))
    _, secret = store.create("ward", share=Share(tokens=40))
    _, roomy = store.create("roomy")

    def ask(key: str, tokens: int) -> int:
        body = {"model": "privmix", "prompt": "The patient", "max_tokens": tokens, "ignore_eos": True}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{watched.base_url}/v1/completions", json=body, headers=headers, timeout=120).status_code

    def told(prefix: str, count: int) -> list[dict[str, Any]]:
        """Waits for the first alerts of a kind. A slow machine may cause other alerts, for example of a stall."""
        deadline = time.monotonic() + 120
        while len(found := [each for each in receiver.alerts if each["event"].startswith(prefix)]) < count:
            assert time.monotonic() < deadline, receiver.events()
            time.sleep(0.1)
        return found

    assert ask(secret.text, 40) == 200
    shares = told("share.", 2)
    assert [(each["event"], each["subject"], each["spent"]) for each in shares] == [
        ("share.threshold", "key ward", 40),
        ("share.exhausted", "key ward", 40),
    ]
    deadline = time.monotonic() + 120
    while "service.unavailable" not in {each["event"] for each in receiver.alerts}:
        assert time.monotonic() < deadline, receiver.events()
        with suppress(LookupError):  # one restart may be shorter than two checks are apart
            watched.kill("Coordinator")
        time.sleep(0.5)
    firing, resolved = told("service.unavailable", 2)
    assert (firing["status"], resolved["status"]) == ("firing", "resolved")
    assert "coordinator" in firing["reasons"]
    watched.wait_until_healthy()
    assert ask(roomy.text, TOKENS) == 200
    budget = told("budget.", 2)
    assert [each["event"] for each in budget] == ["budget.threshold", "budget.exhausted"]
    assert all(each["ensemble"] == "privmix" and each["epsilon"] == 8.0 for each in budget)
    assert "is spent" in budget[-1]["text"]


def test_a_test_alert_says_which_webhook_takes_it(tmp_path: Path, receiver: Receiver) -> None:
    config = tmp_path / "privmix.yaml"

    def sent(*webhooks: str) -> tuple[int, dict[str, Any]]:
        config.write_text(yaml.safe_dump({"ensemble": "here", "alerts": {"webhooks": list(webhooks)}}))
        result = CliRunner().invoke(app, ["alerts", "test", "--config", str(config), "--json"])
        return result.exit_code, json.loads(result.stdout)

    assert sent(receiver.url) == (0, {"webhooks": [{"host": "127.0.0.1", "failure": None}]})
    assert receiver.events() == [("test", "firing", None)]
    assert sent("http://127.0.0.1:9/secret") == (1, {"webhooks": [{"host": "127.0.0.1", "failure": "ConnectError"}]})
    assert sent() == (1, {"webhooks": []})
