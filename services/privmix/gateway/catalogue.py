"""Implements the routes that describe the service: models, version, tokenization, health, and the privacy guarantee."""

import asyncio
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from time import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from privmix.budget.joint_guarantee import JointGuarantee, joint_guarantee
from privmix.budget.statement import Statement
from privmix.gateway.openapi import REFUSALS, body
from privmix.keys.records import Scope
from privmix.requests.access_record import access_record
from privmix.requests.answers import Detokenized, Model, ModelList, Tokenized, Version
from privmix.requests.keys import KeyService
from privmix.requests.models import Models, ServedModel
from privmix.requests.preparation import read_body
from privmix.requests.schema import DetokenizeRequest, TokenizeRequest
from privmix.requests.settings import RequestSettings


class ModelStatement(Statement):
    """Holds the statement of one model."""

    model: str


class Statements(BaseModel):
    """Holds the statements of several models. `together` is the guarantee for a person whose text is in all of them,
    except that it is in one ensemble of each cohort."""

    object: Literal["list"] = "list"
    data: list[ModelStatement]
    together: JointGuarantee


async def statements_of(models: Sequence[ServedModel]) -> Statements:
    """Returns the statements of these models.

    Raises:
        ApiError: 503, a budget actor does not answer.
    """
    statements = await asyncio.gather(*(model.status.statement() for model in models))
    by_name = {model.ensemble.name: statement for model, statement in zip(models, statements, strict=True)}
    data = [ModelStatement(model=name, **dict(statement)) for name, statement in by_name.items()]
    cohorts = {model.ensemble.name: model.ensemble.cohort for model in models}
    return Statements(data=data, together=joint_guarantee(by_name, cohorts))


RETRY_AFTER_S = "5"


class Health(BaseModel):
    """Holds the response of `/health`. `troubles` says for each actor in `missing` why it cannot work.

    Without the keys actor and its database, no request is admitted, so the status is "unavailable".

    In a service with several models, an actor is named `MODEL/ACTOR`, and `status` is "degraded" if some of the models
    are unavailable.
    """

    status: Literal["ok", "degraded", "unavailable"]
    missing: list[str]
    troubles: dict[str, str]


def health_routes(models: Models, keys: KeyService) -> APIRouter:
    """Returns the routes `/livez`, `/readyz` and `/health`.

    `/livez` succeeds while this process runs. `/readyz` succeeds if keys can be checked and some model works: its
    ledger can be written and its shards answer. A spent budget does not change it: no other process could answer more.
    `/health` adds the reasons.
    """
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> Response:
        return _response({"status": "ok"}, ready=True)

    @router.get("/readyz")
    async def readyz() -> Response:
        state = await _health(models, keys)
        ready = state.status != "unavailable"
        return _response({"status": "ok" if ready else "unavailable"}, ready=ready)

    @router.get("/health")
    async def health() -> Response:
        state = await _health(models, keys)
        return _response(state.model_dump(), ready=state.status != "unavailable")

    return router


async def _health(models: Models, keys: KeyService) -> Health:
    serving = [served for served in models.all if served.state == "serving"]
    keys_trouble, troubles_by_model = await asyncio.gather(
        keys.trouble(), asyncio.gather(*(served.status.troubles() for served in serving))
    )
    works = [not model_troubles for model_troubles in troubles_by_model]
    only_model = len(models.all) == 1
    troubles = {
        actor if only_model else f"{served.ensemble.name}/{actor}": trouble
        for served, model_troubles in zip(serving, troubles_by_model, strict=True)
        for actor, trouble in model_troubles.items()
    }
    if keys_trouble is not None:
        return Health(status="unavailable", missing=["keys", *troubles], troubles={"keys": keys_trouble, **troubles})
    status: Literal["ok", "degraded", "unavailable"] = "degraded" if any(works) else "unavailable"
    return Health(status="ok" if works and all(works) else status, missing=list(troubles), troubles=troubles)


def _response(body: dict[str, object], *, ready: bool) -> Response:
    headers = {"cache-control": "no-store", **({} if ready else {"retry-after": RETRY_AFTER_S})}
    return JSONResponse(body, 200 if ready else 503, headers)


# Every key may list `/v1/models`.
_SCOPES: dict[str, Scope] = {"/v1/privacy": "privacy", "/tokenize": "generate", "/detokenize": "generate"}


COUNTED_CONTEXTS = 8
"""How many contexts of a model a text may fill whose tokens `/tokenize` counts."""


def _client(request: Request) -> str:
    """Returns the id of the request's key, which `_authorise` found."""
    return access_record(request).key or ""


class CatalogueRoutes:
    """Implements OpenAI's `/v1/models`, vLLM's `/tokenize` and `/detokenize`, and `/v1/privacy`."""

    def __init__(self, settings: RequestSettings, models: Models, keys: KeyService) -> None:
        self._settings = settings
        self._models = models
        self._keys = keys
        self._started = int(time())

    def router(self) -> APIRouter:
        router = APIRouter(tags=["service"], responses=REFUSALS, dependencies=[Depends(self._authorise)])
        router.add_api_route("/v1/models", self.models, methods=["GET"])
        router.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        router.add_api_route("/v1/privacy", self.privacy, methods=["GET"])
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"], openapi_extra=body(TokenizeRequest))
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"], openapi_extra=body(DetokenizeRequest))
        return router

    async def _authorise(self, request: Request) -> None:
        await self._keys.identify(request, _SCOPES.get(request.url.path))

    async def _sent(self, request: Request) -> bytes:
        sent, _ = await read_body(request, self._settings.max_body_bytes, partial(self._authorise, request))
        return sent

    async def models(self) -> ModelList:
        """List all model names except those of ensembles that drain."""
        return ModelList(
            data=[
                self._model(name)
                for name in self._models.names
                if any(served.state == "serving" for served in self._models.members(name))
            ]
        )

    async def model(self, name: str) -> Model:
        """Describe one model."""
        return self._model(name)

    async def privacy(self, model: Annotated[Sequence[str], Query()] = ()) -> Statement | Statements:
        """Return the privacy guarantee, and the spent and remaining budget.

        The answer does not depend on private text, except `exhausted` and `stopped` of a budget that limits losses
        measured on it; no epsilon is promised then.

        For one `model`, or if the service has only one, returns its statement; otherwise, and for a cohort, a list of
        statements and their joint guarantee.
        """
        selected = [served for name in model for served in self._models.members(name)] or self._models.all
        unique = list({served.ensemble.name: served for served in selected}.values())
        return await unique[0].status.statement() if len(unique) == 1 else await statements_of(unique)

    async def tokenize(self, request: Request) -> Tokenized:
        """Return the token ids of a prompt or of a chat. This costs no budget."""
        with self._keys.opened(request):
            return await self._tokenized(request)

    async def _tokenized(self, request: Request) -> Tokenized:
        body = TokenizeRequest.parse(await self._sent(request))
        served = self._models.named(body.model)
        prompts, client, context_length = served.prompts, _client(request), served.ensemble.context_length
        limit = COUNTED_CONTEXTS * context_length
        if body.messages is not None:
            ((*tokens,),) = await prompts.chat_tokens(body.messages, limit, client)
        else:
            special = body.add_special_tokens is not False
            tokens = [*await prompts.encode(body.prompt or "", limit, "prompt", client, add_special_tokens=special)]
        pieces = await prompts.pieces(tokens, client) if body.return_token_strs else None
        return Tokenized(count=len(tokens), max_model_len=context_length, tokens=tokens, token_strs=pieces)

    async def detokenize(self, request: Request) -> Detokenized:
        """Return the text of token ids. This costs no budget."""
        with self._keys.opened(request):
            return await self._detokenized(request)

    async def _detokenized(self, request: Request) -> Detokenized:
        body = DetokenizeRequest.parse(await self._sent(request))
        served = self._models.named(body.model)
        served.prompts.check(body.tokens, served.ensemble.context_length, "tokens")
        return Detokenized(prompt=await served.prompts.text(body.tokens, _client(request)))

    def _model(self, name: str) -> Model:
        context_length = min(served.ensemble.context_length for served in self._models.members(name))
        return Model(id=name, created=self._started, root=name, max_model_len=context_length)


def version_route() -> APIRouter:
    """Returns the route `/version`, which needs no key."""
    router = APIRouter(tags=["service"])

    @router.get("/version")
    async def privmix_version() -> Version:
        """Return the version of privmix."""
        return Version(version=version("privmix"))

    return router
