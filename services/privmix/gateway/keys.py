"""Authenticates requests, by the keys of the configuration and by the keys that the keys actor stores."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from hmac import compare_digest
from typing import Concatenate, ParamSpec, TypeVar
from uuid import uuid4

from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from starlette.requests import HTTPConnection

from privmix.foundation.actors import find_actor, remote
from privmix.foundation.errors import KeysUnavailable
from privmix.foundation.periodic import periodically
from privmix.foundation.retrying import repeated
from privmix.gateway.access_log import access_record
from privmix.gateway.background import Background
from privmix.gateway.errors import ApiError, refusal, unauthorised, unavailable
from privmix.gateway.places import PLACES, Places
from privmix.gateway.senders import check_sender
from privmix.gateway.settings import RequestSettings
from privmix.keys.actor import Keys
from privmix.keys.messages import AdmissionLimits, Admitted, Identity, InvalidKey, Refused, TrafficUpdate
from privmix.keys.records import Secret

ANONYMOUS = Identity("anonymous", "anonymous", charged=False)
"""The identity of every client while no keys exist: it has no share."""

ANSWER_S = 15.0
"""The time for an answer of the keys actor, which itself gives its database less."""

RETRY_S = 1.0
HEARTBEAT_S = 1.0
SILENT_S = 10.0
"""A keys actor that does not answer a heartbeat for this long is away, perhaps with the head node."""

PLACES_OF_KEY = PLACES // 4
"""The requests of a key whose bodies one gateway awaits or checks at the same time."""

P = ParamSpec("P")
T = TypeVar("T")
KeysMethod = Callable[Concatenate[Keys, P], Awaitable[T]]


class KeyService:
    """Identifies the keys of requests, and calls the keys actor to admit and settle them.

    Without any keys, every client has access, if it is a program or a page that may ask (`check_sender`).
    """

    def __init__(self, settings: RequestSettings) -> None:
        self._settings = settings
        self._configured = [bytes.fromhex(hash_) for hash_ in settings.api_key_hashes]
        self._actor = settings.keys_actor
        self._handle: ActorHandle | None = None
        self._away = asyncio.Event()
        self._gateway = uuid4().hex
        message = f"a key may have {PLACES_OF_KEY} requests at a gateway that are not complete or not checked yet"
        self._open = Places(PLACES_OF_KEY, PLACES, (f"{message}; send fewer at a time", "too_many_open_requests"))
        self._background = Background()

    async def identify(self, connection: HTTPConnection) -> Identity:
        """Returns the identity of the client, and adds it to the access log.

        Raises:
            ApiError: 401, 403, or 503 if the keys actor does not answer.
        """
        identity = await self._identity(_sent_key(connection))
        access_record(connection).key = identity.id
        if identity is ANONYMOUS:
            check_sender(connection, self._settings.allowed_hosts, self._settings.cors_origins)
        return identity

    @contextmanager
    def opened(self, connection: HTTPConnection) -> Iterator[None]:
        """Takes one of a gateway's places for a request that is not admitted, of the key that `identify` found.

        Clients without a key are not told apart, so they share all places.

        Raises:
            ApiError: 429, the key has too many of them.
        """
        key = access_record(connection).key
        with nullcontext() if key is None or key == ANONYMOUS.id else self._open.taken(key):
            yield

    def cache_salt(self, identity: Identity) -> str:
        """Returns the salt of a key's cached prefixes (`privmix.engine.engine.Request`).

        It is a keyed hash, so the shards do not learn whose prompts they read.
        """
        secret = self._settings.cache_secret.get_secret_value()
        return hmac.digest(secret.encode(), identity.id.encode(), "sha256").hex()

    async def admit(
        self,
        id_: str,
        identity: Identity,
        limits: AdmissionLimits,
        wanted: int,
        generations: int,
        identify: Callable[[], Awaitable[Identity]],
    ) -> Admitted:
        """Returns when the request may start. It is charged then, so `settle` must follow.

        Waits for other requests for as long as the actor answers `send_heartbeats`.

        Args:
            identify: identifies the client again after the wait: its key may have been revoked meanwhile.

        Raises:
            ApiError: 400, 401 or 429, nothing was charged; 503, the keys actor does not answer. If it admits the
                request later, the request is ended in the background.
        """
        self._check_presence()
        call = asyncio.ensure_future(self._call(Keys.admit, id_, identity, limits, wanted, generations, self._gateway))
        away = asyncio.ensure_future(self._away.wait())
        try:
            await asyncio.wait((call, away), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._absent()
            outcome = call.result()
            if isinstance(outcome, Admitted):
                await identify()
        except BaseException:  # also if the client leaves
            self._background.start(self._withdraw(id_, call))
            raise
        finally:
            away.cancel()
        if isinstance(outcome, Refused):
            raise refusal(outcome, generations)
        return outcome

    async def trouble(self) -> str | None:
        """Returns why keys cannot be checked and charged now; None if they can."""
        if self._actor is not None:
            try:
                await self.ask(Keys.health)
            except ApiError as error:
                return error.message
        return None

    async def settle(self, id_: str, used: int | None) -> None:
        """See `Keys.settle`. Repeats the call until the actor answers.

        Nothing else settles a request of a gateway that is alive, so its tokens and its places would be held for ever.
        """

        await repeated(lambda: self.ask(Keys.settle, id_, used), ApiError, RETRY_S)

    async def _withdraw(self, id_: str, call: asyncio.Future[Admitted | Refused]) -> None:
        """Ends a request for whose admission nobody waits any more.

        Ray keeps the call for an actor that is away and repeats it after a restart, so the request may be admitted at
        any time until the call has ended, or wait for admission until it is ended again.
        """
        while not call.done():
            await self.settle(id_, 0)
            await asyncio.wait((call,), timeout=RETRY_S)
        await self.settle(id_, 0)
        await asyncio.gather(call, return_exceptions=True)

    async def send_heartbeats(self, take_update: Callable[[], TrafficUpdate]) -> None:
        """Reports this gateway's traffic periodically, which also shows that it is alive (`Keys.heartbeat`)."""

        async def send() -> None:
            update = take_update()
            if self._actor is None:
                return
            try:
                async with asyncio.timeout(SILENT_S):
                    await self._call(Keys.heartbeat, self._gateway, update)
                self._away.clear()
            except (ApiError, TimeoutError):
                self._away.set()

        await periodically(send, HEARTBEAT_S, "no heartbeat was sent")

    async def _identity(self, key: str | None) -> Identity:
        # Compares digests of equal length with all keys, so that the duration reveals nothing about them.
        matches = [compare_digest(_digest(key or ""), digest) for digest in self._configured]
        if any(matches):
            number = matches.index(True)
            return Identity(f"api-key-{number + 1}", f"http.api_keys[{number}]", charged=self._actor is not None)
        identity: Identity | InvalidKey = InvalidKey("unknown", required=False)
        if self._actor is not None:
            identity = await self.ask(Keys.identify, key and Secret(key).hash)
        if isinstance(identity, Identity):
            return identity
        if identity.required or self._configured:
            raise unauthorised(identity)
        return ANONYMOUS

    async def ask(self, method: KeysMethod[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Calls a method of the keys actor that does not wait for other requests.

        Raises:
            ApiError: the actor refused the call, or 503: at once while it is away, else if it does not answer within
                `ANSWER_S`.
        """
        self._check_presence()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._call(method, *arguments, **named)
        except TimeoutError:
            raise unavailable(f"the actor {self._actor!r} does not answer within {ANSWER_S:g} s") from None

    def _check_presence(self) -> None:
        """Raises ApiError 503 while the actor is away: clients need not wait to hear it."""
        if self._away.is_set():
            raise self._absent()

    def _absent(self) -> ApiError:
        return unavailable(f"the actor {self._actor!r} does not answer")

    async def _call(self, method: KeysMethod[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        if self._actor is None:
            raise ApiError(404, "this service stores no keys", code="keys_not_kept")
        try:
            return await remote(method)(await self._find(self._actor), *arguments, **named)
        except RayTaskError as error:
            if isinstance(error.cause, KeysUnavailable):
                raise unavailable("the database of the keys cannot be used now") from None
            raise
        except (RayError, ValueError, RuntimeError):
            self._handle = None
            raise self._absent() from None

    async def _find(self, name: str) -> ActorHandle:
        if self._handle is None:
            self._handle = await find_actor(name, self._settings.ensemble.namespace)
        return self._handle


def _sent_key(connection: HTTPConnection) -> str | None:
    scheme, _, key = connection.headers.get("authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return bytes.fromhex(Secret(key).hash)
