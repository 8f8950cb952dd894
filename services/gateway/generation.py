"""The routes that generate text: completions and chat completions."""

from collections.abc import Sequence
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from services import tracing
from services.coordinator.messages import Generation
from services.gateway.access import record
from services.gateway.answers import Answer
from services.gateway.delivery import streamed, whole
from services.gateway.entrance import Entrance
from services.gateway.hub import Hub
from services.gateway.keys import KeyService
from services.gateway.limits import answer_length, check_counts, check_model, read_body
from services.gateway.openapi import REFUSALS, body
from services.gateway.prompts import Prompts
from services.gateway.responses import ChatCompletion, ChatStyle, Completion, CompletionStyle, Style, Substituted
from services.gateway.schema import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.settings import GatewaySettings
from services.gateway.sse import EventStream, kept_alive, unless_disconnected
from services.keys.messages import Identity

ANSWERED_BY = "x-privmix-answered-by"


class GenerationRoutes:
    """`POST /v1/completions` and `POST /v1/chat/completions`."""

    def __init__(self, settings: GatewaySettings, prompts: Prompts, hub: Hub, keys: KeyService) -> None:
        self._settings = settings
        self._prompts = prompts
        self._hub = hub
        self._keys = keys

    def router(self) -> APIRouter:
        router = APIRouter(tags=["generation"], responses=REFUSALS)
        router.add_api_route(
            "/v1/completions",
            self.completions,
            methods=["POST"],
            response_model=Completion,
            openapi_extra=body(CompletionRequest),
        )
        router.add_api_route(
            "/v1/chat/completions",
            self.chat_completions,
            methods=["POST"],
            response_model=ChatCompletion,
            openapi_extra=body(ChatRequest),
        )
        return router

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts."""
        identity = await self._keys.identify(request, "generate")
        settings = self._settings
        asked = CompletionRequest.parse(await read_body(request, settings.max_body_bytes), settings.nearest)
        check_model(asked.model, settings)
        check_counts(asked, len(asked.prompt), settings)
        prompts = await self._prompts.tokens(asked.prompt)
        echoes = [self._prompts.text(prompt) for prompt in asked.prompt for _ in range(asked.n)]
        style = CompletionStyle(echoes if asked.echo else None)
        return await self._answer(request, identity, asked, prompts, style, settings.default_max_tokens)

    async def chat_completions(self, request: Request) -> Response:
        """Answer the last message of a chat."""
        identity = await self._keys.identify(request, "generate")
        settings = self._settings
        asked = ChatRequest.parse(await read_body(request, settings.max_body_bytes), settings.nearest)
        check_model(asked.model, settings)
        check_counts(asked, 1, settings)
        prompts = await self._prompts.chat_tokens(asked.messages)
        return await self._answer(request, identity, asked, prompts, ChatStyle(), settings.default_chat_max_tokens)

    async def _answer(
        self,
        request: Request,
        identity: Identity,
        asked: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        style: Style,
        default_length: int,
    ) -> Response:
        length = answer_length(asked, prompts, default_length, self._settings)
        options = asked.options(self._settings.nearest)
        trace = tracing.traceparent()
        generations = [
            Generation(uuid4().hex, prompt, options, length, tuple(asked.stop), trace, asked.ignore_eos)
            for prompt in prompts
            for _ in range(asked.n)
        ]
        answer = Answer(
            style, asked.model, generations, sum(map(len, prompts)), _substituted(asked, options.temperature)
        )
        record(request).answer = answer
        self._hub.seen.request()
        entrance = Entrance(self._hub, self._keys, identity)
        if asked.stream:
            chunks = streamed(
                entrance.submit,
                generations,
                answer,
                self._settings.write_interval_s,
                asked.include_usage,
                asked.continuous_usage,
            )
            chunks = kept_alive(chunks, self._settings.heartbeat_s)
            # The status line must wait for the first chunk: until then this can still be refused.
            first = await unless_disconnected(request.receive, anext(chunks))
            return EventStream(first, chunks, _marks(answer) | entrance.headers)
        written = await unless_disconnected(request.receive, whole(entrance.submit, generations, answer))
        return Response(
            written.model_dump_json(), media_type="application/json", headers=_marks(answer) | entrance.headers
        )


def _substituted(asked: GenerationRequest, temperature: float) -> Substituted:
    instead = Substituted()
    if asked.greedy:
        instead["temperature"] = temperature
    if asked.seed is not None:
        instead["seed"] = "ignored"
    return instead


def _marks(answer: Answer) -> dict[str, str]:
    answered_by = answer.privmix.answered_by if answer.privmix else None
    return {ANSWERED_BY: answered_by} if answered_by else {}
