"""Implements the routes for administrators, which manage keys and shares. A change applies to the next request."""

from datetime import timedelta
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field

from privmix.database.clock import now
from privmix.gateway.openapi import REFUSALS, body
from privmix.keys.actor import Keys
from privmix.keys.records import CLIENT_SCOPES, SCOPES, Key, KeyAccount, Scope, Share
from privmix.requests.errors import invalid
from privmix.requests.keys import KeyService
from privmix.requests.preparation import read_body
from privmix.requests.schema import Body
from privmix.requests.values import BoundedCount, Name, PositiveCount

MAX_BODY_BYTES = 1 << 16
MAX_DAYS = 36_500

Scopes = Annotated[
    tuple[Scope, ...],
    Field(fail_fast=True),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


class ShareBody(Body):
    """The limits of a share; null is no limit."""

    tokens: BoundedCount | None = Field(None, description="Private tokens in total.")
    tokens_per_day: BoundedCount | None = Field(None, description="Private tokens from midnight to midnight UTC.")
    requests_per_minute: PositiveCount | None = None
    tokens_per_minute: PositiveCount | None = None
    live_streams: PositiveCount | None = Field(None, description="Concurrent answers, counting every choice.")
    largest_request: PositiveCount | None = Field(
        None, description="The largest prompts x n x max_tokens of one request."
    )

    @property
    def share(self) -> Share:
        return Share(**self.model_dump())


class NewKey(Body):
    """The body of `POST /v1/keys`."""

    name: Name = Field(min_length=1, max_length=64)
    owner: Name = Field("", max_length=128)
    group: Name | None = Field(
        None, min_length=1, max_length=64, description="The keys of a group also have a share together."
    )
    scopes: Scopes = Field(CLIENT_SCOPES, min_length=1, description=f"Any of {', '.join(SCOPES)}.")
    expires: AwareDatetime | None = None
    expires_in_days: int | None = Field(None, gt=0, le=MAX_DAYS)
    share: ShareBody = ShareBody()


class Rotation(Body):
    """The body of `POST /v1/keys/{key}/rotate`: for how many seconds the old secret stays valid."""

    grace_s: int = Field(0, ge=0, le=86_400 * 30)


class CreatedKey(BaseModel):
    """A new key or secret. `secret` is not stored and cannot be shown again."""

    secret: str
    key: Key


class KeyList(BaseModel):
    object: str = "list"
    data: list[KeyAccount]


BODIES = (NewKey, Rotation, ShareBody)


class AdministrationRoutes:
    """Implements `/v1/keys`, the counterpart of `privmix keys`, for keys with the scope `administer`."""

    def __init__(self, keys: KeyService) -> None:
        self._keys = keys

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", tags=["keys"], responses=REFUSALS, dependencies=[Depends(self._administrator)])
        router.add_api_route("/keys", self.listed, methods=["GET"])
        router.add_api_route("/keys", self.create, methods=["POST"], openapi_extra=body(NewKey))
        router.add_api_route("/keys/{key}", self.account, methods=["GET"])
        router.add_api_route("/keys/{key}", self.revoke, methods=["DELETE"])
        router.add_api_route("/keys/{key}/rotate", self.rotate, methods=["POST"], openapi_extra=body(Rotation))
        router.add_api_route("/keys/{key}/share", self.limit, methods=["PUT"], openapi_extra=body(ShareBody))
        router.add_api_route("/groups/{group}/share", self.limit_group, methods=["PUT"], openapi_extra=body(ShareBody))
        return router

    async def _administrator(self, request: Request) -> None:
        await self._keys.identify(request, "administer")

    async def _sent(self, request: Request) -> bytes:
        with self._keys.opened(request):
            sent, _ = await read_body(request, MAX_BODY_BYTES, partial(self._administrator, request))
        return sent

    async def listed(self) -> KeyList:
        """List all keys with their shares and usage."""
        return KeyList(data=await self._keys.ask(Keys.accounts))

    async def account(self, key: str) -> KeyAccount:
        """Return a key by its id or name."""
        return await self._keys.ask(Keys.account, key)

    async def create(self, request: Request) -> CreatedKey:
        """Create a key. The response is the only one that contains its secret."""
        new = NewKey.parse(await self._sent(request))
        if new.expires is not None and new.expires_in_days is not None:
            raise invalid("expires_in_days", "conflicts with expires; give only one of them")
        if new.expires is not None and new.expires <= now():
            raise invalid("expires", "is in the past")
        expires = now() + timedelta(days=new.expires_in_days) if new.expires_in_days else new.expires
        key, secret = await self._keys.ask(
            Keys.create, new.name, new.owner, new.group, new.scopes, expires, new.share.share
        )
        return CreatedKey(secret=secret, key=key)

    async def limit(self, key: str, request: Request) -> KeyAccount:
        """Replace the share of a key."""
        body = ShareBody.parse(await self._sent(request))
        return await self._keys.ask(Keys.limit, key, body.share)

    async def limit_group(self, group: str, request: Request) -> Share:
        """Replace the share that the keys of a group have together."""
        body = ShareBody.parse(await self._sent(request))
        await self._keys.ask(Keys.limit_group, group, body.share)
        return body.share

    async def rotate(self, key: str, request: Request) -> CreatedKey:
        """Give a key a new secret."""
        rotation = Rotation.parse(await self._sent(request) or b"{}")
        rotated, secret = await self._keys.ask(Keys.rotate, key, timedelta(seconds=rotation.grace_s))
        return CreatedKey(secret=secret, key=rotated)

    async def revoke(self, key: str) -> Key:
        """Revoke a key permanently."""
        return await self._keys.ask(Keys.revoke, key)
