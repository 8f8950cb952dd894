"""Implements the routes that describe the service: models, version, tokenization, health, and the privacy guarantee."""

import asyncio
from functools import partial
from importlib.metadata import version
from time import time

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from privmix.budget.statement import Statement
from privmix.gateway.access_log import access_record
from privmix.gateway.answers import Json
from privmix.gateway.errors import RETRY_AFTER_S, wait_header
from privmix.gateway.keys import KeyService
from privmix.gateway.openapi import body
from privmix.gateway.preparation import read_body
from privmix.gateway.schema import TokenizeRequest
from privmix.gateway.served_model import ServedModel
from privmix.gateway.settings import RequestSettings


def public_routes(served: ServedModel, keys: KeyService) -> APIRouter:
    """Returns the routes that need no key: `/livez`, `/readyz`, `/health` and `/version`.

    `/livez` succeeds while this process runs. `/readyz` succeeds if keys can be checked and the model works: its
    ledger can be written and its shards answer. A spent budget does not change it: no other process could answer more.
    `/health` says for each actor in `missing` why it cannot work.
    """
    router = APIRouter(tags=["service"])

    async def health() -> Json:
        keys_trouble, troubles = await asyncio.gather(keys.trouble(), served.status.troubles())
        troubles = ({} if keys_trouble is None else {"keys": keys_trouble}) | troubles
        return {"status": "unavailable" if troubles else "ok", "missing": list(troubles), "troubles": troubles}

    def response(body: Json) -> Response:
        ready = body["status"] == "ok"
        headers = {"cache-control": "no-store", **({} if ready else wait_header(RETRY_AFTER_S))}
        return JSONResponse(body, 200 if ready else 503, headers)

    @router.get("/livez")
    async def livez() -> Response:
        return response({"status": "ok"})

    @router.get("/readyz")
    async def readyz() -> Response:
        return response({"status": (await health())["status"]})

    @router.get("/health")
    async def health_() -> Response:
        return response(await health())

    @router.get("/version")
    async def version_() -> Json:
        """Return the version of privmix."""
        return {"version": version("privmix")}

    return router


COUNTED_CONTEXTS = 8
"""How many contexts of a model a text may fill whose tokens `/tokenize` counts."""


class CatalogueRoutes:
    """Implements OpenAI's `/v1/models`, vLLM's `/tokenize`, and `/v1/privacy`."""

    def __init__(self, settings: RequestSettings, served: ServedModel, keys: KeyService) -> None:
        self._settings = settings
        self._served = served
        self._context_length = served.ensemble.context_length
        self._keys = keys
        self._started = int(time())

    def router(self) -> APIRouter:
        router = APIRouter(tags=["service"], dependencies=[Depends(self._authorise)])
        router.add_api_route("/v1/models", self.models, methods=["GET"])
        router.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        router.add_api_route("/v1/privacy", self.privacy, methods=["GET"])
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"], openapi_extra=body(TokenizeRequest))
        return router

    async def _authorise(self, request: Request) -> None:
        await self._keys.identify(request)

    async def models(self) -> Json:
        """List the names of the model."""
        return {"object": "list", "data": [self._model(name) for name in self._served.ensemble.names]}

    async def model(self, name: str) -> Json:
        """Describe one model."""
        self._served.check_name(name)
        return self._model(name)

    def _model(self, name: str) -> Json:
        """Describes a name of the model. `max_model_len` is vLLM's field: the tokens of prompt and answer together."""
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "privmix",
            "root": name,
            "parent": None,
            "max_model_len": self._context_length,
        }

    async def privacy(self) -> Statement:
        """Return the privacy guarantee, and the spent and remaining budget.

        The answer does not depend on private text, except `exhausted` and `stopped` of a budget that limits losses
        measured on it; no epsilon is promised then.
        """
        return await self._served.status.statement()

    async def tokenize(self, request: Request) -> Json:
        """Return the token ids of a prompt or of a chat. This costs no budget."""
        with self._keys.opened(request):
            sent, _ = await read_body(request, self._settings.max_body_bytes, partial(self._authorise, request))
            body = TokenizeRequest.parse(sent)
            self._served.check_name(body.model)
            prompts, client = self._served.prompts, access_record(request).key or ""
            limit = COUNTED_CONTEXTS * self._context_length
            if body.messages is not None:
                (tokens,) = await prompts.chat_tokens(body.messages, limit, client)
            else:
                special = body.add_special_tokens is not False
                tokens = await prompts.encode(body.prompt or "", limit, "prompt", client, add_special_tokens=special)
        return {"count": len(tokens), "max_model_len": self._context_length, "tokens": tokens}
