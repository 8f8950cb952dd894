"""Posts alerts to one webhook, signed as the Standard Webhooks specification says.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import asyncio
import base64
import hmac
import logging
import time
from hashlib import sha256

import httpx
from pydantic import SecretStr

from services.alerts.outbox import Outbox
from services.alerts.settings import key_of
from services.keys.records import KeysUnavailable, now

TIMEOUT_S = 10.0
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 300.0
GIVE_UP_S = 86_400.0
"""An alert that could not be delivered for this long is dropped."""

_log = logging.getLogger(__name__)


def signature(key: bytes, id_: str, timestamp: int, body: str) -> str:
    """HMAC-SHA256 of id, time and body, so that a receiver can refuse what is old or from elsewhere."""
    signed = f"{id_}.{timestamp}.{body}".encode()
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def headers(id_: str, body: str, secret: SecretStr | None) -> dict[str, str]:
    timestamp = int(time.time())
    common = {"content-type": "application/json", "webhook-id": id_, "webhook-timestamp": str(timestamp)}
    return common if secret is None else common | {"webhook-signature": signature(key_of(secret), id_, timestamp, body)}


async def post(client: httpx.AsyncClient, url: SecretStr, id_: str, body: str, secret: SecretStr | None) -> str | None:
    """Post one alert; returns None when the receiver has it, else why it does not. Never shows the URL."""
    try:
        answer = await client.post(
            url.get_secret_value(), content=body.encode(), headers=headers(id_, body, secret), timeout=TIMEOUT_S
        )
    except httpx.HTTPError as error:
        return type(error).__name__
    return None if answer.is_success else f"it answers {answer.status_code}"


class Webhook:
    """Delivers the alerts of one receiver in their order, each until the receiver has it: at least once."""

    def __init__(self, url: SecretStr, secret: SecretStr | None, outbox: Outbox) -> None:
        self.receiver = sha256(url.get_secret_value().encode()).hexdigest()
        """Names the receiver in the database, without its address."""
        self._url = url
        self._host = httpx.URL(url.get_secret_value()).host
        self._secret = secret
        self._outbox = outbox
        self._more = asyncio.Event()

    def wake(self) -> None:
        """There are new alerts."""
        self._more.set()

    async def deliver(self) -> None:
        """Deliver for ever."""
        pause = FIRST_RETRY_S
        async with httpx.AsyncClient() as client:
            while True:
                self._more.clear()
                try:
                    failure = await self._deliver_first(client)
                except KeysUnavailable as error:
                    failure = str(error)
                if failure is None:
                    pause = FIRST_RETRY_S
                    continue
                if failure:
                    _log.warning("alerts for %s wait: %s", self._host, failure)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_RETRY_S)
                else:
                    await self._more.wait()

    async def _deliver_first(self, client: httpx.AsyncClient) -> str | None:
        """None where an alert was dealt with, "" where there is none, else why it could not be delivered."""
        alert = await asyncio.to_thread(self._outbox.first, self.receiver)
        if alert is None:
            return ""
        failure = await post(client, self._url, alert.id, alert.body, self._secret)
        if failure is not None and (now() - alert.created).total_seconds() < GIVE_UP_S:
            return failure
        if failure is not None:
            _log.error("an alert for %s is given up after a day: %s", self._host, failure)
        await asyncio.to_thread(self._outbox.remove, alert.number)
        return None
