"""The routes that say what is served: models, version, tokens, the guarantee and its budget."""

from importlib.metadata import version
from time import time

from fastapi import APIRouter, Depends, Request

from services.budget.statement import Statement
from services.gateway.errors import invalid
from services.gateway.keys import KeyService
from services.gateway.limits import check_model, read_body
from services.gateway.openapi import REFUSALS, body
from services.gateway.prompts import Prompts
from services.gateway.responses import Detokenized, Model, ModelList, Tokenized, Version
from services.gateway.schema import DetokenizeRequest, TokenizeRequest
from services.gateway.settings import GatewaySettings
from services.gateway.status import Status
from services.keys.records import Scope

# `/v1/models` is for every key.
_SCOPES: dict[str, Scope] = {"/v1/privacy": "privacy", "/tokenize": "generate", "/detokenize": "generate"}


class CatalogueRoutes:
    """What a client asks before it generates; `/v1/models` as OpenAI's, `/tokenize` and `/detokenize` as vLLM's."""

    def __init__(self, settings: GatewaySettings, prompts: Prompts, status: Status, keys: KeyService) -> None:
        self._settings = settings
        self._prompts = prompts
        self._status = status
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
        """The names of the one ensemble."""
        return ModelList(data=[self._model(name) for name in self._settings.served_model_names])

    async def model(self, name: str) -> Model:
        """One of these names."""
        check_model(name, self._settings)
        return self._model(name)

    async def privacy(self) -> Statement:
        """What is promised, spent and left; nothing here depends on the private text."""
        return await self._status.statement()

    async def tokenize(self, request: Request) -> Tokenized:
        """The token ids of a prompt or of a chat; costs no budget."""
        asked = TokenizeRequest.parse(await read_body(request, self._settings.max_body_bytes))
        check_model(asked.model or self._settings.served_model_names[0], self._settings)
        if asked.messages is not None:
            ((*tokens,),) = await self._prompts.chat_tokens(asked.messages)
        else:
            special = asked.add_special_tokens is not False
            tokens = [*await self._prompts.encode(asked.prompt or "", add_special_tokens=special)]
        pieces = self._prompts.pieces(tokens) if asked.return_token_strs else None
        return Tokenized(
            count=len(tokens), max_model_len=self._settings.context_length, tokens=tokens, token_strs=pieces
        )

    async def detokenize(self, request: Request) -> Detokenized:
        """The text of token ids; costs no budget."""
        asked = DetokenizeRequest.parse(await read_body(request, self._settings.max_body_bytes))
        check_model(asked.model or self._settings.served_model_names[0], self._settings)
        if len(asked.tokens) > self._settings.context_length:
            raise invalid("tokens", f"at most {self._settings.context_length} tokens", "context_length_exceeded")
        self._prompts.check(asked.tokens, "tokens")
        return Detokenized(prompt=self._prompts.text(asked.tokens))

    def _model(self, name: str) -> Model:
        return Model(id=name, created=self._started, root=name, max_model_len=self._settings.context_length)


def version_route() -> APIRouter:
    """`/version`, which needs no key."""
    router = APIRouter(tags=["service"])

    @router.get("/version")
    async def privmix_version() -> Version:
        """The version of privmix."""
        return Version(version=version("privmix"))

    return router
