"""Posts alerts to one webhook, signed by the Standard Webhooks specification.

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
from services.database.clock import now
from services.errors import KeysUnavailable

TIMEOUT_S = 10.0
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 300.0
GIVE_UP_S = 86_400.0
"""An undelivered alert is dropped after this time."""

_log = logging.getLogger(__name__)


def signature(key: bytes, id_: str, timestamp: int, body: str) -> str:
    """Returns the HMAC-SHA256 of id, time and body. With it, receivers reject old and foreign requests."""
    signed = f"{id_}.{timestamp}.{body}".encode()
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def headers(id_: str, body: str, secret: SecretStr | None) -> dict[str, str]:
    """Returns the HTTP headers for an alert, with a signature if there is a secret."""
    timestamp = int(time.time())
    common = {"content-type": "application/json", "webhook-id": id_, "webhook-timestamp": str(timestamp)}
    return common if secret is None else common | {"webhook-signature": signature(key_of(secret), id_, timestamp, body)}


async def post(client: httpx.AsyncClient, url: SecretStr, id_: str, body: str, secret: SecretStr | None) -> str | None:
    """Posts one alert. Returns None on success, else the reason of the failure without the URL."""
    try:
        response = await client.post(
            url.get_secret_value(), content=body.encode(), headers=headers(id_, body, secret), timeout=TIMEOUT_S
        )
    except httpx.HTTPError as error:
        return type(error).__name__
    return None if response.is_success else f"it answers {response.status_code}"


class Webhook:
    """Delivers the alerts of one receiver in order and at least once: retries each until the receiver accepts it."""

    def __init__(self, url: SecretStr, secret: SecretStr | None, outbox: Outbox) -> None:
        self.receiver = sha256(url.get_secret_value().encode()).hexdigest()
        """The receiver's name in the database: a hash, because the URL is a secret."""
        self._url = url
        self._host = httpx.URL(url.get_secret_value()).host
        self._secret = secret
        self._outbox = outbox
        self._has_alerts = asyncio.Event()

    def wake(self) -> None:
        """Makes `deliver` look for new alerts."""
        self._has_alerts.set()

    async def deliver(self) -> None:
        """Delivers alerts until it is cancelled."""
        pause = FIRST_RETRY_S
        async with httpx.AsyncClient() as client:
            while True:
                self._has_alerts.clear()
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
                    await self._has_alerts.wait()

    async def _deliver_first(self, client: httpx.AsyncClient) -> str | None:
        """Returns None if an alert was delivered or dropped, "" if there is none, else why the delivery failed."""
        alert = await asyncio.to_thread(self._outbox.first, self.receiver)
        if alert is None:
            return ""
        failure = await post(client, self._url, alert.id, alert.body, self._secret)
        if failure is not None and (now() - alert.created).total_seconds() < GIVE_UP_S:
            return failure
        if failure is not None:
            _log.error("an alert for %s is dropped after a day: %s", self._host, failure)
        await asyncio.to_thread(self._outbox.remove, alert.number)
        return None
