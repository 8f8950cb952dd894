"""Posts alerts to one webhook, signed by the Standard Webhooks specification.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import asyncio
import base64
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import NoReturn, TypeVar

import httpx
from pydantic import SecretStr

from privmix.alerts.outbox import Outbox, Undelivered
from privmix.alerts.settings import key_of
from privmix.database.clock import now
from privmix.foundation.errors import KeysUnavailable
from privmix.foundation.periodic import periodically
from privmix.foundation.retrying import pauses, repeated

TIMEOUT_S = 10.0
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 300.0
LONGEST_REFUSED_RETRY_S = 3600.0
"""The longest pause between two attempts at an alert that the receiver refuses: the same body is hardly accepted later.
"""
GIVE_UP_S = 86_400.0
"""An undelivered alert is dropped after this time."""

NOT_NOW = frozenset({408, 425, 429, 502, 503, 504})
"""The statuses by which a receiver, or a proxy before it, accepts no alert now. Others are about one alert."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


def signature(key: bytes, id_: str, timestamp: int, body: str) -> str:
    """Returns the HMAC-SHA256 of id, time and body. With it, receivers reject old and foreign requests."""
    signed = f"{id_}.{timestamp}.{body}".encode()
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def headers(id_: str, body: str, secret: SecretStr | None) -> dict[str, str]:
    """Returns the HTTP headers for an alert, with a signature if there is a secret."""
    timestamp = int(time.time())
    common = {"content-type": "application/json", "webhook-id": id_, "webhook-timestamp": str(timestamp)}
    return common if secret is None else common | {"webhook-signature": signature(key_of(secret), id_, timestamp, body)}


@dataclass(frozen=True)
class DeliveryFailure:
    """Says why an alert was not accepted.

    Attributes:
        reason: contains no URL.
        refused: whether the receiver refuses this alert, and may accept another one.
    """

    reason: str
    refused: bool = False


async def post(
    client: httpx.AsyncClient, url: SecretStr, id_: str, body: str, secret: SecretStr | None
) -> DeliveryFailure | None:
    """Posts one alert. Returns None if the receiver accepted it."""
    try:
        response = await client.post(
            url.get_secret_value(), content=body.encode(), headers=headers(id_, body, secret), timeout=TIMEOUT_S
        )
    except httpx.HTTPError as error:
        return DeliveryFailure(type(error).__name__)
    if response.is_success:
        return None
    return DeliveryFailure(f"it answers {response.status_code}", response.status_code not in NOT_NOW)


class Webhook:
    """Delivers the alerts of one receiver at least once: in order, except that one that it refuses delays no other.

    It retries each until the receiver accepts it or a day has passed.
    """

    def __init__(self, url: SecretStr, secret: SecretStr | None, outbox: Outbox) -> None:
        self.receiver = sha256(url.get_secret_value().encode()).hexdigest()
        """The receiver's name in the database: a hash, because the URL is a secret."""
        self._url = url
        self._host = httpx.URL(url.get_secret_value()).host
        self._secret = secret
        self._outbox = outbox
        self._has_alerts = asyncio.Event()
        self._refused: set[int] = set()
        """The numbers of the alerts that `_retry` delivers."""

    def wake(self) -> None:
        """Makes `deliver` look for new alerts."""
        self._has_alerts.set()

    async def deliver(self) -> None:
        """Delivers alerts until it is cancelled."""
        await periodically(self._deliver, FIRST_RETRY_S, f"alerts for {self._host} could not be delivered")

    async def _deliver(self) -> NoReturn:
        self._refused.clear()  # no `_retry` runs now
        async with httpx.AsyncClient() as client, asyncio.TaskGroup() as retries:
            while True:
                self._has_alerts.clear()
                alert = await self._durably(lambda: self._outbox.first(self.receiver, self._refused))
                if alert is None:
                    await self._has_alerts.wait()
                elif not await self._deliver_one(client, alert):
                    self._refused.add(alert.number)
                    retries.create_task(self._retry(client, alert))

    async def _deliver_one(self, client: httpx.AsyncClient, alert: Undelivered) -> bool:
        """Posts an alert until the receiver answers. Returns False if it refuses the alert."""
        waits = pauses(FIRST_RETRY_S, LONGEST_RETRY_S)
        while (failure := await self._post(client, alert)) is not None and not failure.refused:
            await asyncio.sleep(next(waits))
        return failure is None

    async def _retry(self, client: httpx.AsyncClient, alert: Undelivered) -> None:
        """Posts an alert that the receiver refused again and again."""
        waits = pauses(FIRST_RETRY_S, LONGEST_REFUSED_RETRY_S)
        await asyncio.sleep(next(waits))
        while await self._post(client, alert) is not None:
            await asyncio.sleep(next(waits))
        self._refused.discard(alert.number)

    async def _post(self, client: httpx.AsyncClient, alert: Undelivered) -> DeliveryFailure | None:
        """Posts an alert, and removes it if it was delivered or is too old. Returns why it is still there."""
        failure = await post(client, self._url, alert.id, alert.body, self._secret)
        if failure is not None and (now() - alert.created).total_seconds() < GIVE_UP_S:
            logger.warning("an alert for %s waits: %s", self._host, failure.reason)
            return failure
        if failure is not None:
            logger.error("an alert for %s is dropped after a day: %s", self._host, failure.reason)
        await self._durably(lambda: self._outbox.remove(alert.number))
        return None

    async def _durably(self, work: Callable[[], T]) -> T:
        """Repeats a transaction until the database accepts it."""
        return await repeated(
            lambda: asyncio.to_thread(work),
            KeysUnavailable,
            pauses(FIRST_RETRY_S, LONGEST_RETRY_S),
            log=lambda error: logger.warning("alerts for %s wait: %s", self._host, error),
        )
