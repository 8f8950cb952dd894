"""Authenticates requests, by the keys of the configuration and by the keys that the keys actor stores."""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import Concatenate, ParamSpec, TypeVar
from uuid import uuid4

from pydantic import SecretStr
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from starlette.requests import HTTPConnection

from services.actors import find_actor, remote
from services.errors import KeysError, KeysUnavailable, UnknownKey
from services.keys.actor import Keys
from services.keys.messages import (
    AdmissionLimits,
    Admitted,
    Identity,
    InvalidKey,
    RateState,
    RateStates,
    Refused,
    TrafficUpdate,
)
from services.keys.records import CLIENT_SCOPES, Scope, Secret
from services.requests.answers import Answer
from services.requests.errors import NO_RETRY, ApiError, invalid, unavailable
from services.requests.web_pages import check_sender
from services.retrying import pauses, repeated

ANONYMOUS = Identity("anonymous", "anonymous", CLIENT_SCOPES, ())
"""The identity of every client while no keys exist: it has no shares and cannot administer."""

CONFIGURED = "configured:"
"""The prefix of an owner that is a key of the configuration. The key's hash follows, because their order may change."""

ANSWER_S = 15.0
"""The time for an answer of the keys actor, which itself gives its database less."""

RETRY_S = 1.0

RATES, LIMITED = ("limit", "remaining", "reset"), ("requests", "tokens")
"""The parts of the names of OpenAI's headers `x-ratelimit-RATE-LIMITED`."""

P = ParamSpec("P")
T = TypeVar("T")
KeysMethod = Callable[Concatenate[Keys, P], Awaitable[T]]

CLIENT_GONE = 499
"""The status in the log of a request whose client left before its response began."""


@dataclass
class AccessRecord:
    """Holds what the log shows of a request besides its route and duration. `key` is the id of the key."""

    request_id: str
    status: int = CLIENT_GONE
    key: str | None = None
    answer: Answer | None = None


def access_record(connection: HTTPConnection) -> AccessRecord:
    """Returns the record of a request, which its handler completes."""
    entry: AccessRecord = connection.scope["privmix.record"]
    return entry


class KeyService:
    """Identifies the keys of requests, and calls the keys actor to admit and settle them.

    If `actor` is None, only the keys with `api_key_hashes` are valid. Without any keys, every client has access.
    Services with the same `cache_secret` give a key the same `cache_salt`; by default, no other service has it. `hosts`
    and `origins` are those of clients without a key (`check_sender`).
    """

    def __init__(
        self,
        api_key_hashes: Sequence[str],
        namespace: str,
        actor: str | None,
        cache_secret: SecretStr | None = None,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ) -> None:
        self._configured = [bytes.fromhex(hash_) for hash_ in api_key_hashes]
        self._namespace = namespace
        self._actor = actor
        self._hosts, self._origins = hosts, origins
        self._cache_secret = (cache_secret.get_secret_value() if cache_secret else secrets.token_hex(32)).encode()
        self._handle: ActorHandle | None = None
        self._gateway = uuid4().hex

    async def identify(self, connection: HTTPConnection, scope: Scope | None) -> Identity:
        """Returns the identity of the client, which needs `scope`, and adds it to the access log.

        Raises:
            ApiError: 401, 403, or 503 if the keys actor does not answer.
        """
        identity = await self._identity(_sent_key(connection))
        access_record(connection).key = identity.id
        if identity is ANONYMOUS:
            check_sender(connection, self._hosts, self._origins)
        if scope is not None and scope not in identity.scopes:
            raise _forbidden(scope, identity)
        return identity

    async def owner(self, connection: HTTPConnection, scope: Scope) -> str:
        """Returns the name under which data of the client's key is stored. `identity_of` accepts it.

        Raises:
            ApiError: as in `identify`.
        """
        identity = await self.identify(connection, scope)
        if not self._is_configured(identity):
            return identity.id
        return CONFIGURED + _digest(_sent_key(connection) or "").hex()[:32]

    async def identity_of(self, owner: str) -> Identity:
        """Returns the current identity of an owner. Tokens of `ANONYMOUS` are counted too.

        Raises:
            ApiError: 401, the key is no longer valid; 503, the keys actor does not answer.
        """
        if owner.startswith(CONFIGURED):
            prefixes = [CONFIGURED + digest.hex()[:32] for digest in self._configured]
            if owner not in prefixes:
                raise _unauthorised(InvalidKey("revoked"))
            return self._of_configuration(prefixes.index(owner))
        if owner == ANONYMOUS.id:
            refused = await self.ask(Keys.identify, None)
            if isinstance(refused, InvalidKey) and (refused.required or self._configured):
                raise _unauthorised(refused)
            return replace(ANONYMOUS, subjects=(f"key:{ANONYMOUS.id}",))
        identity = await self.ask(Keys.identity, owner)
        if isinstance(identity, InvalidKey):
            raise _unauthorised(identity)
        return identity

    def cache_salt(self, identity: Identity) -> str:
        """Returns the salt of a key's cached prefixes (`services.engine.engine.Request`).

        It is a keyed hash, so the shards do not learn whose prompts they read.
        """
        return hmac.digest(self._cache_secret, identity.id.encode(), "sha256").hex()

    async def admit(
        self,
        id_: str,
        identity: Identity,
        limits: AdmissionLimits,
        wanted: int,
        generations: int,
        background: bool = False,
    ) -> Admitted:
        """Returns when the request may start. It is charged then, so `settle` must follow.

        Raises:
            ApiError: 400 or 429, nothing was charged; 503, the keys actor does not answer.
        """
        outcome = await self._wait(
            Keys.admit, id_, identity.subjects, limits, wanted, generations, self._gateway, background
        )
        if isinstance(outcome, Refused):
            raise refusal(outcome, wanted, generations)
        return outcome

    async def enter(self, id_: str, generations: int) -> bool:
        """See `Keys.enter`. Returns False if the actor does not answer."""
        with suppress(ApiError):
            await self._wait(Keys.enter, id_, generations)
            return True
        return False

    async def leave(self, id_: str, generations: int) -> None:
        """See `Keys.leave`. `settle` gives up the places too."""
        with suppress(ApiError):
            await self.ask(Keys.leave, id_, generations)

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

        async def settle() -> None:
            try:
                await self.ask(Keys.settle, id_, used)
            except ApiError as error:
                if error.status >= 500:
                    raise

        await repeated(settle, ApiError, pauses(RETRY_S))

    async def heartbeat(self, update: TrafficUpdate) -> None:
        """See `Keys.heartbeat`."""
        if self._actor is not None:
            with suppress(ApiError):
                await self.ask(Keys.heartbeat, self._gateway, update)

    async def _identity(self, key: str | None) -> Identity:
        # Compares digests of equal length with all keys, so that the duration reveals nothing about them.
        matches = [compare_digest(_digest(key or ""), digest) for digest in self._configured]
        if any(matches):
            return self._of_configuration(matches.index(True))
        identity: Identity | InvalidKey = InvalidKey("unknown", required=False)
        if self._actor is not None:
            identity = await self.ask(Keys.identify, key and Secret(key).hash)
        if isinstance(identity, Identity):
            return identity
        if identity.required or self._configured:
            raise _unauthorised(identity)
        return ANONYMOUS

    def _of_configuration(self, number: int) -> Identity:
        name = f"api-key-{number + 1}"
        return Identity(
            name, f"http.api_keys[{number}]", CLIENT_SCOPES, (f"key:{name}",) if self._actor is not None else ()
        )

    def _is_configured(self, identity: Identity) -> bool:
        return any(identity == self._of_configuration(number) for number in range(len(self._configured)))

    async def ask(self, method: KeysMethod[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Calls a method of the keys actor that does not wait for other requests.

        Raises:
            ApiError: the actor refused the call, or 503 if it does not answer within `ANSWER_S`.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._call(method, *arguments, **named)
        except TimeoutError:
            raise unavailable(f"the actor {self._actor!r} does not answer within {ANSWER_S:g} s") from None

    async def _wait(self, method: KeysMethod[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Calls a method of the keys actor that may wait for other requests, for as long as the actor is alive.

        Raises:
            ApiError: as in `ask`. An actor that hangs is noticed within twice `ANSWER_S`.
        """
        waiting = asyncio.ensure_future(self._call(method, *arguments, **named))
        try:
            while not (await asyncio.wait((waiting,), timeout=ANSWER_S))[0]:
                await self.ask(Keys.ready)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _call(self, method: KeysMethod[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        if self._actor is None:
            raise ApiError(404, "this service stores no keys", code="keys_not_kept")
        try:
            return await remote(method)(await self._find(self._actor), *arguments, **named)
        except RayTaskError as error:
            if isinstance(error.cause, KeysError):
                raise _translate(error.cause) from None
            raise
        except (RayError, ValueError, RuntimeError):
            self._handle = None
            raise unavailable(f"the actor {self._actor!r} does not answer") from None

    async def _find(self, name: str) -> ActorHandle:
        if self._handle is None:
            self._handle = await find_actor(name, self._namespace)
        return self._handle


def refusal(refused: Refused, wanted: int, generations: int) -> ApiError:
    """Returns the HTTP error for a refusal of the keys actor."""
    headers = rate_headers(refused.rates)
    limit = refused.limit
    match refused.reason:
        case "request_too_large" | "larger_than_a_minute":
            within = "in one request" if refused.reason == "request_too_large" else "per minute"
            message = f"prompts x n x max_tokens is {wanted}, but this key may use {limit} {within}; reduce it"
            return invalid("max_tokens", message, "request_too_large")
        case "more_than_live_streams":
            message = f"prompts x n is {generations}, but this key may have {limit} concurrent answers; reduce it"
            return invalid("n", message, "request_too_large")
        case "share_exhausted":
            message = "this key's share of the privacy budget is exhausted; it does not refill"
            return ApiError(
                429, message, code="share_exhausted", kind="insufficient_quota", headers={**headers, **NO_RETRY}
            )
        case "daily_share_exhausted":
            message = "this key's tokens for today are used up; it has new ones after midnight UTC"
            code, headers = "daily_share_exhausted", {**headers, **NO_RETRY}
        case "live_streams":
            message, code = f"this key already has {limit} concurrent answers, its maximum", "too_many_streams"
        case "overloaded":
            message, code = "too many requests wait; try again soon", "overloaded"
        case "requests_per_minute" | "tokens_per_minute":
            unit = refused.reason.removesuffix("_per_minute")
            message, code = f"this key may use {limit} {unit} per minute", "rate_limit_exceeded"
    if refused.retry_after_s is not None:
        headers = {**headers, "retry-after": str(max(1, -int(-refused.retry_after_s // 1)))}
    return ApiError(429, message, code=code, kind="rate_limit_error", headers=headers)


def rate_headers(rates: RateStates) -> dict[str, str]:
    """Returns OpenAI's `x-ratelimit-*` headers for the limits that exist."""
    headers: dict[str, str] = {}
    states: dict[str, RateState | None] = {"requests": rates.requests, "tokens": rates.tokens}
    for name, state in states.items():
        if state is not None:
            values = (str(state.limit), str(state.remaining), f"{state.reset_s:.3f}s")
            headers |= {f"x-ratelimit-{rate}-{name}": value for rate, value in zip(RATES, values, strict=True)}
    return headers


def _sent_key(connection: HTTPConnection) -> str | None:
    scheme, _, key = connection.headers.get("authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return bytes.fromhex(Secret(key).hash)


def _unauthorised(refused: InvalidKey) -> ApiError:
    message = {
        "unknown": "give an API key of this service in the header: Authorization: Bearer KEY",
        "expired": "this API key has expired; ask the service's administrator for a new one",
        "revoked": "this API key was revoked; ask the service's administrator for a new one",
    }[refused.reason]
    return ApiError(
        401,
        message,
        code="invalid_api_key",
        kind="authentication_error",
        headers={"www-authenticate": "Bearer"},
    )


def _forbidden(scope: Scope, identity: Identity) -> ApiError:
    create = "create one with `privmix keys create NAME --scope administer`"
    fix = create if identity is ANONYMOUS else "use another key"
    return ApiError(
        403, f"this route needs a key with the scope {scope!r}; {fix}", code="missing_scope", kind="permission_error"
    )


def _translate(error: KeysError) -> ApiError:
    """Returns the HTTP error for an error of the keys actor."""
    match error:
        case UnknownKey():
            return ApiError(404, "no such key", code="key_not_found")
        case KeysUnavailable():
            return unavailable("the database of the keys cannot be used now")
        case _:
            return ApiError(400, str(error), code="invalid_value", param=str(error).partition(":")[0])
