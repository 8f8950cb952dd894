"""Implements the routes that describe the service: models, version, tokenization, and the privacy guarantee."""

from collections.abc import Sequence
from importlib.metadata import version
from time import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from services.budget.statement import Statement
from services.gateway.errors import invalid
from services.gateway.keys import KeyService
from services.gateway.limits import read_body
from services.gateway.models import Models
from services.gateway.openapi import REFUSALS, body
from services.gateway.responses import Detokenized, Model, ModelList, Tokenized, Version
from services.gateway.schema import DetokenizeRequest, TokenizeRequest
from services.gateway.settings import GatewaySettings
from services.gateway.statements import Statements, statements_of
from services.keys.records import Scope

# Every key may list `/v1/models`.
_SCOPES: dict[str, Scope] = {"/v1/privacy": "privacy", "/tokenize": "generate", "/detokenize": "generate"}


class CatalogueRoutes:
    """Implements OpenAI's `/v1/models`, vLLM's `/tokenize` and `/detokenize`, and `/v1/privacy`."""

    def __init__(self, settings: GatewaySettings, models: Models, keys: KeyService) -> None:
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
        body = TokenizeRequest.parse(await read_body(request, self._settings.max_body_bytes))
        served = self._models.named(body.model)
        if body.messages is not None:
            ((*tokens,),) = await served.prompts.chat_tokens(body.messages)
        else:
            special = body.add_special_tokens is not False
            tokens = [*await served.prompts.encode(body.prompt or "", add_special_tokens=special)]
        pieces = served.prompts.pieces(tokens) if body.return_token_strs else None
        return Tokenized(
            count=len(tokens), max_model_len=served.ensemble.context_length, tokens=tokens, token_strs=pieces
        )

    async def detokenize(self, request: Request) -> Detokenized:
        """Return the text of token ids. This costs no budget."""
        body = DetokenizeRequest.parse(await read_body(request, self._settings.max_body_bytes))
        served = self._models.named(body.model)
        context_length = served.ensemble.context_length
        if len(body.tokens) > context_length:
            raise invalid("tokens", f"give at most {context_length} tokens", "context_length_exceeded")
        served.prompts.check(body.tokens, "tokens")
        return Detokenized(prompt=served.prompts.text(body.tokens))

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
