"""What the gateway knows of keys: the configuration's own, and those that the keys actor keeps."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from hmac import compare_digest
from typing import Any
from uuid import uuid4

import ray
from pydantic import SecretStr
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from starlette.requests import HTTPConnection

from services.gateway.access import record
from services.gateway.errors import NO_RETRY, ApiError, invalid, unavailable
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
from services.keys.records import CLIENT_SCOPES, KeysError, KeysUnavailable, Scope, UnknownKey

ANONYMOUS = Identity("anonymous", "anonymous", CLIENT_SCOPES, ())
"""Everyone, where there are no keys: no shares, and no administration."""

CONFIGURED = "configured:"
"""Begins the name of an owner that is a key of the configuration; its hash follows, because their order may change."""

RATES, LIMITED = ("limit", "remaining", "reset"), ("requests", "tokens")
"""The middle and the end of the names of OpenAI's `x-ratelimit-*` headers."""


class KeyService:
    """Says who asks, and asks the keys actor for their tokens.

    Without an actor's name only `api_keys` count; without these, everyone is let in.
    """

    def __init__(self, api_keys: Sequence[SecretStr], namespace: str, actor: str | None) -> None:
        self._configured = [_digest(key.get_secret_value()) for key in api_keys]
        self._namespace = namespace
        self._actor = actor
        self._handle: ActorHandle | None = None
        self._gateway = uuid4().hex

    async def identify(self, connection: HTTPConnection, scope: Scope | None) -> Identity:
        """Who sent this request, which needs `scope`; noted in its record.

        Raises:
            ApiError: 401, 403; 503 where the keys actor does not answer.
        """
        identity = await self._identity(_shown(connection))
        record(connection).key = identity.id
        if scope is not None and scope not in identity.scopes:
            raise _forbidden(scope, identity)
        return identity

    async def owner(self, connection: HTTPConnection, scope: Scope) -> str:
        """Who sent this request, as `identity_of` knows it: for what is stored for a key alone.

        Raises:
            ApiError: as `identify`.
        """
        identity = await self.identify(connection, scope)
        if not self._is_configured(identity):
            return identity.id
        return CONFIGURED + _digest(_shown(connection) or "").hex()[:32]

    async def identity_of(self, owner: str) -> Identity:
        """The key of an owner, as it is now; tokens of `ANONYMOUS` are counted, too.

        Raises:
            ApiError: 401, the key is not valid any more; 503 where the keys actor does not answer.
        """
        if owner.startswith(CONFIGURED):
            prefixes = [CONFIGURED + digest.hex()[:32] for digest in self._configured]
            if owner not in prefixes:
                raise _unauthorised(InvalidKey("revoked"))
            return self._of_configuration(prefixes.index(owner))
        if owner == ANONYMOUS.id:
            found = await self.ask("identify", None)
            if found.required or self._configured:
                raise _unauthorised(found)
            return replace(ANONYMOUS, subjects=(f"key:{ANONYMOUS.id}",))
        found = await self.ask("identity", owner)
        if isinstance(found, InvalidKey):
            raise _unauthorised(found)
        identity: Identity = found
        return identity

    async def admit(
        self,
        id_: str,
        identity: Identity,
        limits: AdmissionLimits,
        wanted: int,
        generations: int,
        background: bool = False,
    ) -> Admitted:
        """Returns when the request may begin; it is charged then, and `settle` must follow.

        Raises:
            ApiError: 400, 429: nothing is charged; 503: the keys actor does not answer.
        """
        outcome = await self.ask(
            "admit", id_, identity.subjects, limits, wanted, generations, self._gateway, background
        )
        if isinstance(outcome, Refused):
            raise refusal(outcome, wanted, generations)
        admitted: Admitted = outcome
        return admitted

    async def settle(self, id_: str, used: int | None) -> None:
        """See `Keys.settle`. What cannot be settled stays charged: the safe side."""
        with suppress(ApiError):
            await self.ask("settle", id_, used)

    async def heartbeat(self, seen: TrafficUpdate) -> None:
        if self._actor is not None:
            with suppress(ApiError):
                await self.ask("heartbeat", self._gateway, seen)

    async def _identity(self, shown: str | None) -> Identity:
        # Digests have one length, and all keys are looked at, so the time tells nothing of them.
        matches = [compare_digest(_digest(shown or ""), digest) for digest in self._configured]
        if any(matches):
            return self._of_configuration(matches.index(True))
        if self._actor is None:
            found: Identity | InvalidKey = InvalidKey("unknown", required=False)
        else:
            found = await self.ask("identify", shown and _digest(shown).hex())
        if isinstance(found, Identity):
            return found
        if found.required or self._configured:
            raise _unauthorised(found)
        return ANONYMOUS

    def _of_configuration(self, number: int) -> Identity:
        name = f"api-key-{number + 1}"
        return Identity(
            name, f"http.api_keys[{number}]", CLIENT_SCOPES, (f"key:{name}",) if self._actor is not None else ()
        )

    def _is_configured(self, identity: Identity) -> bool:
        return any(identity == self._of_configuration(number) for number in range(len(self._configured)))

    async def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of the keys actor.

        Raises:
            ApiError: what cannot be done, as HTTP says it; 503 where the actor does not answer.
        """
        if self._actor is None:
            raise ApiError(404, "this service keeps no keys", code="keys_not_kept")
        try:
            return await getattr(await self._found(), method).remote(*arguments)
        except RayTaskError as error:
            if isinstance(error.cause, KeysError):
                raise _of_keys(error.cause) from None
            raise
        except (RayError, ValueError, RuntimeError):
            self._handle = None
            raise unavailable(f"the actor {self._actor!r} does not answer") from None

    async def _found(self) -> ActorHandle:
        if self._handle is None:
            if not ray.is_initialized():
                raise RuntimeError("Ray is not initialised")
            self._handle = await asyncio.to_thread(ray.get_actor, self._actor, self._namespace)
        return self._handle


def refusal(refused: Refused, wanted: int, generations: int) -> ApiError:
    """The keys actor's refusal as OpenAI's clients know it."""
    headers = rate_headers(refused.rates)
    limit = refused.limit
    match refused.reason:
        case "request_too_large" | "larger_than_a_minute":
            within = "in one request" if refused.reason == "request_too_large" else "in a minute"
            message = f"prompts x n x max_tokens is {wanted}, and this key may ask for {limit} {within}; ask for less"
            return invalid("max_tokens", message, "request_too_large")
        case "more_than_live_streams":
            message = f"prompts x n is {generations}, and this key may have {limit} answers at one time; ask for less"
            return invalid("n", message, "request_too_large")
        case "share_exhausted":
            message = "the share of the privacy budget that this key has is used up; it does not come back with time"
            return ApiError(
                429, message, code="share_exhausted", kind="insufficient_quota", headers={**headers, **NO_RETRY}
            )
        case "daily_share_exhausted":
            message = "this key's tokens of today are used up; there are new ones after midnight UTC"
            code, headers = "daily_share_exhausted", {**headers, **NO_RETRY}
        case "live_streams":
            message, code = f"this key has {limit} answers under way, as many as it may have", "too_many_streams"
        case "overloaded":
            message, code = "too many requests wait for the service; try again soon", "overloaded"
        case "requests_per_minute" | "tokens_per_minute":
            what = refused.reason.removesuffix("_per_minute")
            message, code = f"this key may use {limit} {what} a minute", "rate_limit_exceeded"
    if refused.retry_after_s is not None:
        headers = {**headers, "retry-after": str(max(1, -int(-refused.retry_after_s // 1)))}
    return ApiError(429, message, code=code, kind="rate_limit_error", headers=headers)


def rate_headers(rates: RateStates) -> dict[str, str]:
    """OpenAI's `x-ratelimit-*` headers, for the limits that there are."""
    headers: dict[str, str] = {}
    states: dict[str, RateState | None] = {"requests": rates.requests, "tokens": rates.tokens}
    for name, state in states.items():
        if state is not None:
            values = (str(state.limit), str(state.remaining), f"{state.reset_s:.3f}s")
            headers |= {f"x-ratelimit-{what}-{name}": value for what, value in zip(RATES, values, strict=True)}
    return headers


def _shown(connection: HTTPConnection) -> str | None:
    scheme, _, shown = connection.headers.get("authorization", "").partition(" ")
    return shown.strip() or None if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _unauthorised(found: InvalidKey) -> ApiError:
    message = {
        "unknown": "give an API key of this service in the header: Authorization: Bearer KEY",
        "expired": "this API key has expired; ask the service's administrator for another",
        "revoked": "this API key was revoked; ask the service's administrator for another",
    }[found.reason]
    return ApiError(
        401,
        message,
        code="invalid_api_key",
        kind="authentication_error",
        headers={"www-authenticate": "Bearer"},
    )


def _forbidden(scope: Scope, identity: Identity) -> ApiError:
    fix = "make one with `privmix keys create NAME --scope administer`" if identity is ANONYMOUS else "use another key"
    return ApiError(
        403, f"this needs a key with the scope {scope!r}; {fix}", code="missing_scope", kind="permission_error"
    )


def _of_keys(error: KeysError) -> ApiError:
    match error:
        case UnknownKey():
            return ApiError(404, "there is no such key", code="key_not_found")
        case KeysUnavailable():
            return unavailable("the database of the keys cannot be used now")
        case _:
            return ApiError(400, str(error), code="invalid_value", param=str(error).partition(":")[0])
