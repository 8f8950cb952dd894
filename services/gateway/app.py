"""The HTTP routes, from their collaborators; the same app under Ray Serve and in tests."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import time
from uuid import uuid4

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services import tracing
from services.budget.statement import Statement
from services.coordinator.messages import Generation
from services.gateway.access import CLIENT_GONE, AccessLog, authorise, record
from services.gateway.answers import Answer
from services.gateway.delivery import streamed, whole
from services.gateway.errors import ApiError, from_http
from services.gateway.health import health_routes
from services.gateway.hub import Hub
from services.gateway.limits import answer_length, check_counts, check_model, model_not_found, read_body
from services.gateway.metrics import refusals
from services.gateway.prompts import Prompts
from services.gateway.responses import ChatStyle, CompletionStyle, Model, ModelList, Style
from services.gateway.schema import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.settings import GatewaySettings
from services.gateway.sse import EventStream, unless_disconnected
from services.gateway.status import Status

ANSWERED_BY = "x-privmix-answered-by"


def build_app(
    settings: GatewaySettings, prompts: Prompts, hub: Hub, status: Status, *, answer_request_id: bool = True
) -> FastAPI:
    """The gateway's ASGI application. Its lifespan keeps the hub's line to the coordinator open."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with hub.running():
            yield

    # FastAPI's own schema would not know these bodies: they are read by hand, for the limit and for OpenAI's errors.
    app = FastAPI(title="privmix", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.add_middleware(AccessLog, answer_id=answer_request_id)
    app.add_exception_handler(ApiError, _refusal)
    app.add_exception_handler(HTTPException, _refusal)
    app.add_exception_handler(ClientDisconnect, _refusal)
    app.include_router(health_routes(status))
    app.include_router(_Routes(settings, prompts, hub, status).router())
    return app


def _refusal(_: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            return _counted(error)
        case HTTPException():
            return _counted(from_http(error))
        case _:
            return Response(status_code=CLIENT_GONE)


def _counted(error: ApiError) -> Response:
    refusals.inc(tags={"reason": error.code})
    return error.response()


class _Routes:
    def __init__(self, settings: GatewaySettings, prompts: Prompts, hub: Hub, status: Status) -> None:
        self._settings = settings
        self._prompts = prompts
        self._hub = hub
        self._status = status
        self._started = int(time())

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", dependencies=[Depends(self._authorise)])
        router.add_api_route("/completions", self.completions, methods=["POST"])
        router.add_api_route("/chat/completions", self.chat_completions, methods=["POST"])
        router.add_api_route("/models", self.models, methods=["GET"])
        router.add_api_route("/models/{name:path}", self.model, methods=["GET"])
        router.add_api_route("/privacy", self.privacy, methods=["GET"])
        return router

    async def _authorise(self, request: Request) -> None:
        authorise(request, self._settings.api_keys)

    async def completions(self, request: Request) -> Response:
        asked = CompletionRequest.parse(await read_body(request, self._settings.max_body_bytes))
        check_model(asked, self._settings)
        check_counts(asked, len(asked.prompt), self._settings)
        prompts = await self._prompts.tokens(asked.prompt)
        echoes = [self._prompts.text(prompt) for prompt in asked.prompt for _ in range(asked.n)]
        style = CompletionStyle(echoes if asked.echo else None)
        return await self._answer(request, asked, prompts, style, self._settings.default_max_tokens)

    async def chat_completions(self, request: Request) -> Response:
        asked = ChatRequest.parse(await read_body(request, self._settings.max_body_bytes))
        check_model(asked, self._settings)
        check_counts(asked, 1, self._settings)
        prompts = await self._prompts.chat_tokens(asked.messages)
        return await self._answer(request, asked, prompts, ChatStyle(), self._settings.default_chat_max_tokens)

    async def models(self) -> ModelList:
        return ModelList(data=[self._model(name) for name in self._settings.served_model_names])

    async def model(self, name: str) -> Model:
        if name not in self._settings.served_model_names:
            raise model_not_found(self._settings)
        return self._model(name)

    async def privacy(self) -> Statement:
        return await self._status.statement()

    def _model(self, name: str) -> Model:
        return Model(id=name, created=self._started)

    async def _answer(
        self,
        request: Request,
        asked: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        style: Style,
        default_length: int,
    ) -> Response:
        length = answer_length(asked, prompts, default_length, self._settings)
        trace = tracing.traceparent()
        generations = [
            Generation(uuid4().hex, prompt, asked.options, length, tuple(asked.stop), trace)
            for prompt in prompts
            for _ in range(asked.n)
        ]
        answer = Answer(style, asked.model, generations, sum(map(len, prompts)))
        record(request).answer = answer
        if asked.stream:
            chunks = streamed(
                self._hub,
                generations,
                answer,
                self._settings.write_interval_s,
                asked.include_usage,
                asked.continuous_usage,
            )
            # The status line must wait for the first chunk: until then this can still be refused.
            first = await unless_disconnected(request.receive, anext(chunks))
            return EventStream(first, chunks, _marks(answer))
        body = await unless_disconnected(request.receive, whole(self._hub, generations, answer))
        return Response(body.model_dump_json(), media_type="application/json", headers=_marks(answer))


def _marks(answer: Answer) -> dict[str, str]:
    return {ANSWERED_BY: answer.privmix.answered_by} if answer.privmix else {}
