"""The routes that say what is served: models, version, tokens, the guarantee and its budget."""

from collections.abc import Sequence
from importlib.metadata import version
from time import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from services.budget.statement import Statement
from services.gateway.account import Statements, statements_of
from services.gateway.errors import invalid
from services.gateway.keys import KeyService
from services.gateway.limits import read_body
from services.gateway.openapi import REFUSALS, body
from services.gateway.responses import Detokenized, Model, ModelList, Tokenized, Version
from services.gateway.schema import DetokenizeRequest, TokenizeRequest
from services.gateway.served import Models, Served
from services.gateway.settings import GatewaySettings
from services.keys.records import Scope

# `/v1/models` is for every key.
_SCOPES: dict[str, Scope] = {"/v1/privacy": "privacy", "/tokenize": "generate", "/detokenize": "generate"}


class CatalogueRoutes:
    """What a client asks before it generates; `/v1/models` as OpenAI's, `/tokenize` and `/detokenize` as vLLM's."""

    def __init__(self, settings: GatewaySettings, models: Models, keys: KeyService) -> None:
        self._settings = settings
        self._models = models
        self._keys = keys
        self._started = int(time())

    def router(self) -> APIRouter:
        router = APIRouter(tags=["service"], responses=REFUSALS, dependencies=[Depends(self._known)])
        router.add_api_route("/v1/models", self.models, methods=["GET"])
        router.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        router.add_api_route("/v1/privacy", self.privacy, methods=["GET"])
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"], openapi_extra=body(TokenizeRequest))
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"], openapi_extra=body(DetokenizeRequest))
        return router

    async def _known(self, request: Request) -> None:
        await self._keys.identify(request, _SCOPES.get(request.url.path))

    async def models(self) -> ModelList:
        """Every model name. An ensemble that is about to be retired is not listed."""
        serving = [served for served in self._models.all if served.state == "serving"]
        return ModelList(data=[self._model(served, name) for served in serving for name in served.ensemble.names])

    async def model(self, name: str) -> Model:
        """One of these names."""
        return self._model(self._models.named(name), name)

    async def privacy(self, model: Annotated[Sequence[str], Query()] = ()) -> Statement | Statements:
        """What is promised, spent and left; nothing here depends on the private text.

        Of one `model`, or of the only one that there is: its statement. Else a list of statements, and their sum.
        """
        asked = [self._models.named(name) for name in model] or self._models.all
        unique = list({served.ensemble.name: served for served in asked}.values())
        return await unique[0].status.statement() if len(unique) == 1 else await statements_of(unique)

    async def tokenize(self, request: Request) -> Tokenized:
        """The token ids of a prompt or of a chat; costs no budget."""
        asked = TokenizeRequest.parse(await read_body(request, self._settings.max_body_bytes))
        served = self._models.named(asked.model)
        if asked.messages is not None:
            ((*tokens,),) = await served.prompts.chat_tokens(asked.messages)
        else:
            special = asked.add_special_tokens is not False
            tokens = [*await served.prompts.encode(asked.prompt or "", add_special_tokens=special)]
        pieces = served.prompts.pieces(tokens) if asked.return_token_strs else None
        return Tokenized(
            count=len(tokens), max_model_len=served.ensemble.context_length, tokens=tokens, token_strs=pieces
        )

    async def detokenize(self, request: Request) -> Detokenized:
        """The text of token ids; costs no budget."""
        asked = DetokenizeRequest.parse(await read_body(request, self._settings.max_body_bytes))
        served = self._models.named(asked.model)
        most = served.ensemble.context_length
        if len(asked.tokens) > most:
            raise invalid("tokens", f"at most {most} tokens", "context_length_exceeded")
        served.prompts.check(asked.tokens, "tokens")
        return Detokenized(prompt=served.prompts.text(asked.tokens))

    def _model(self, served: Served, name: str) -> Model:
        return Model(id=name, created=self._started, root=name, max_model_len=served.ensemble.context_length)


def version_route() -> APIRouter:
    """`/version`, which needs no key."""
    router = APIRouter(tags=["service"])

    @router.get("/version")
    async def privmix_version() -> Version:
        """The version of privmix."""
        return Version(version=version("privmix"))

    return router
