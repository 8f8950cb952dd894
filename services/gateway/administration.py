"""The administrators' routes: keys and their shares. A change applies to the next request."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field

from services.gateway.errors import invalid
from services.gateway.keys import KeyService
from services.gateway.limits import read_body
from services.gateway.openapi import REFUSALS, body
from services.gateway.schema import Body
from services.gateway.served import Models
from services.keys.records import CLIENT_SCOPES, SCOPES, Key, KeyAccount, Scope, Share, now

MAX_BODY_BYTES = 1 << 16
MAX_DAYS = 36_500

Scopes = Annotated[tuple[Scope, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class ShareBody(Body):
    """A share; null is no limit. Attributes as in `Share`."""

    tokens: int | None = Field(None, ge=0, description="Of the privacy budget, in all.")
    tokens_per_day: int | None = Field(None, ge=0, description="Of the privacy budget, from midnight to midnight UTC.")
    requests_per_minute: int | None = Field(None, gt=0)
    tokens_per_minute: int | None = Field(None, gt=0)
    live_streams: int | None = Field(None, gt=0, description="Answers under way at one time, every choice.")
    largest_request: int | None = Field(None, gt=0, description="prompts x n x max_tokens of one request.")

    @property
    def share(self) -> Share:
        return Share(**self.model_dump())


class NewKey(Body):
    """The body of `POST /v1/keys`."""

    name: str = Field(min_length=1, max_length=64)
    owner: str = Field("", max_length=128)
    group: str | None = Field(
        None, min_length=1, max_length=64, description="Keys of a group also have one share together."
    )
    scopes: Scopes = Field(CLIENT_SCOPES, min_length=1, description=f"Of {', '.join(SCOPES)}.")
    expires: AwareDatetime | None = None
    expires_in_days: int | None = Field(None, gt=0, le=MAX_DAYS)
    share: ShareBody = ShareBody()


class Rotation(Body):
    """The body of `POST /v1/keys/{key}/rotate`: for how long the old secret goes on."""

    grace_s: int = Field(0, ge=0, le=86_400 * 30)


class CreatedKey(BaseModel):
    """`secret` is shown this once, and stored nowhere."""

    secret: str
    key: Key


class KeyList(BaseModel):
    object: str = "list"
    data: list[KeyAccount]


BODIES = (NewKey, Rotation, ShareBody)


class AdministrationRoutes:
    """`/v1/keys`: what `privmix keys` does, for keys with the scope `administer`."""

    def __init__(self, models: Models, keys: KeyService) -> None:
        self._models = models
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

    async def listed(self) -> KeyList:
        """Every key, with its share and what it used."""
        return KeyList(data=await self._keys.ask("accounts"))

    async def account(self, key: str) -> KeyAccount:
        """One key, by its id or name."""
        account: KeyAccount = await self._keys.ask("account", key)
        return account

    async def create(self, request: Request) -> CreatedKey:
        """Make a key; its secret is shown this once."""
        asked = NewKey.parse(await read_body(request, MAX_BODY_BYTES))
        if asked.expires is not None and asked.expires_in_days is not None:
            raise invalid("expires_in_days", "expires says otherwise; give one of them")
        if asked.expires is not None and asked.expires <= now():
            raise invalid("expires", "lies in the past")
        expires = now() + timedelta(days=asked.expires_in_days) if asked.expires_in_days else asked.expires
        key, secret = await self._keys.ask(
            "create", asked.name, asked.owner, asked.group, asked.scopes, expires, asked.share.share
        )
        return CreatedKey(secret=secret, key=key)

    async def limit(self, key: str, request: Request, model: str | None = None) -> KeyAccount:
        """Replace the share of a key: of all models together, or of one."""
        asked = ShareBody.parse(await read_body(request, MAX_BODY_BYTES))
        account: KeyAccount = await self._keys.ask("limit", key, asked.share, self._shares(model))
        return account

    async def limit_group(self, group: str, request: Request, model: str | None = None) -> Share:
        """Replace the share that the keys of a group have together: of all models together, or of one."""
        asked = ShareBody.parse(await read_body(request, MAX_BODY_BYTES))
        await self._keys.ask("limit_group", group, asked.share, self._shares(model))
        return asked.share

    def _shares(self, model: str | None) -> str | None:
        """The name under which keys have shares of a model alone.

        Raises:
            ApiError: 404, there is no such model; 400, it has no shares of its own.
        """
        if model is None:
            return None
        shares = self._models.named(model).ensemble.shares
        if shares is None:
            raise invalid("model", "this model has no name under `ensembles` in the configuration, so it has no shares "
                          "of its own; leave model out to limit all models together")  # fmt: skip
        return shares

    async def rotate(self, key: str, request: Request) -> CreatedKey:
        """Give a key another secret."""
        asked = Rotation.parse(await read_body(request, MAX_BODY_BYTES) or b"{}")
        rotated, secret = await self._keys.ask("rotate", key, timedelta(seconds=asked.grace_s))
        return CreatedKey(secret=secret, key=rotated)

    async def revoke(self, key: str) -> Key:
        """Refuse a key from now on, for good."""
        revoked: Key = await self._keys.ask("revoke", key)
        return revoked
