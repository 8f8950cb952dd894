"""Claim: a webhook delivers signed alerts to a real HTTP server in order, and retries until each is accepted.

An alert that the server refuses does not delay the others.
"""

import asyncio
import base64
import hmac
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from privmix.alerts import webhook
from privmix.alerts.alert import Alert
from privmix.alerts.outbox import Outbox
from privmix.alerts.webhook import Webhook, signature
from privmix.database.service import ServiceDatabase
from tests.services.alerts.receiver import Receiver, receiving

pytestmark = pytest.mark.anyio

SECRET = SecretStr("whsec_" + base64.b64encode(b"a key of thirty-two random bytes").decode())


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(ServiceDatabase(tmp_path / "keys.db"), "privmix")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(webhook, "FIRST_RETRY_S", 0.01)
    with receiving() as started:
        yield started


def alert(number: int) -> Alert:
    return Alert(event="test", ensemble="clinic", namespace="privmix", text=f"number {number}")


async def test_alerts_arrive_signed_once_and_in_order(outbox: Outbox, receiver: Receiver) -> None:
    hook = Webhook(SecretStr(receiver.url), SECRET, outbox)
    outbox.put([alert(1), alert(2)], {}, [hook.receiver])
    delivering = asyncio.create_task(hook.deliver())
    await asyncio.to_thread(receiver.wait_for, 2)
    outbox.put([alert(3)], {}, [hook.receiver])
    hook.wake()
    await asyncio.to_thread(receiver.wait_for, 3)
    delivering.cancel()
    assert [alert["text"] for alert in receiver.alerts] == ["number 1", "number 2", "number 3"]
    for headers, body in receiver.received:
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{body}".encode()
        expected = hmac.digest(b"a key of thirty-two random bytes", signed, "sha256")
        assert headers["webhook-signature"] == "v1," + base64.b64encode(expected).decode()
        assert headers["content-type"] == "application/json"
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 3


def test_the_signature_matches_the_specification() -> None:
    """Uses the example from the specification's libraries."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = '{"test": 2432232314}'
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body) == expected


async def test_a_failed_delivery_is_retried_without_logging_the_url(
    outbox: Outbox, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.statuses = [503, 429, 502]
    hook = Webhook(SecretStr(f"{receiver.url}?token=hunter2"), None, outbox)
    outbox.put([alert(1), alert(2)], {}, [hook.receiver])
    with caplog.at_level(logging.DEBUG, "privmix.alerts"):
        delivering = asyncio.create_task(hook.deliver())
        await asyncio.to_thread(receiver.wait_for, 2)
        delivering.cancel()
    assert [alert["text"] for alert in receiver.alerts] == ["number 1", "number 2"]
    assert "webhook-signature" not in receiver.received[0][0]
    assert "it answers 503" in caplog.text
    assert "hunter2" not in caplog.text


async def test_a_refused_alert_does_not_delay_later_ones(outbox: Outbox, receiver: Receiver) -> None:
    receiver.refuses = {"number 1", "number 3"}
    hook = Webhook(SecretStr(receiver.url), None, outbox)
    outbox.put([alert(number) for number in (1, 2, 3, 4)], {}, [hook.receiver])
    delivering = asyncio.create_task(hook.deliver())
    assert [alert["text"] for alert in await asyncio.to_thread(receiver.wait_for, 2)] == ["number 2", "number 4"]
    outbox.put([alert(5)], {}, [hook.receiver])
    hook.wake()
    assert (await asyncio.to_thread(receiver.wait_for, 3))[-1]["text"] == "number 5"
    assert receiver.refusals >= 2
    receiver.refuses = set()
    arrived = await asyncio.to_thread(receiver.wait_for, 5)
    assert {alert["text"] for alert in arrived[3:]} == {"number 1", "number 3"}
    while outbox.first(hook.receiver) is not None:  # The receiver gets the alert before the database removes it.
        await asyncio.sleep(0.02)
    delivering.cancel()


async def test_an_unreachable_receiver_does_not_delay_others(outbox: Outbox, receiver: Receiver) -> None:
    unreachable = Webhook(SecretStr("http://127.0.0.1:9/hook"), None, outbox)
    hook = Webhook(SecretStr(receiver.url), None, outbox)
    outbox.put([alert(1)], {}, [unreachable.receiver, hook.receiver])
    tasks = [asyncio.create_task(webhook.deliver()) for webhook in (unreachable, hook)]
    await asyncio.to_thread(receiver.wait_for, 1)
    async with asyncio.timeout(30):
        while outbox.first(hook.receiver) is not None:  # The receiver gets the alert before the database removes it.
            await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    assert outbox.first(unreachable.receiver) is not None
    outbox.keep_receivers([hook.receiver])
    assert outbox.first(unreachable.receiver) is None


async def test_an_undelivered_alert_is_dropped_after_a_day(
    outbox: Outbox, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "GIVE_UP_S", 0.0)
    receiver.statuses = [500]
    hook = Webhook(SecretStr(receiver.url), None, outbox)
    outbox.put([alert(1), alert(2)], {}, [hook.receiver])
    delivering = asyncio.create_task(hook.deliver())
    assert [alert["text"] for alert in await asyncio.to_thread(receiver.wait_for, 1)] == ["number 2"]
    delivering.cancel()


def test_alerts_and_levels_survive_a_restart_together(outbox: Outbox, tmp_path: Path) -> None:
    outbox.put([alert(1)], {"budget": 0.5}, ["a"])
    again = Outbox(ServiceDatabase(tmp_path / "keys.db"), "privmix")
    assert again.levels() == {"budget": 0.5}
    assert again.first("a") is not None
    other = Outbox(ServiceDatabase(tmp_path / "keys.db"), "another")
    assert other.levels() == {}
    assert other.first("a") is None
