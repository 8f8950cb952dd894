"""Implements the routes that generate text: completions and chat completions."""

from functools import partial

from fastapi import APIRouter, Request, Response
from openai.types import Completion
from openai.types.chat import ChatCompletion
from ray.util.metrics import Counter

from privmix.gateway.access_log import access_record
from privmix.gateway.admission import admitted
from privmix.gateway.answers import Answer, to_json
from privmix.gateway.keys import KeyService
from privmix.gateway.openapi import body
from privmix.gateway.preparation import prepare, read_body
from privmix.gateway.schema import ChatRequest, CompletionRequest
from privmix.gateway.served_model import ServedModel
from privmix.gateway.settings import RequestSettings
from privmix.gateway.streaming import EventStream, complete_answer, kept_alive, stream_answer, unless_disconnected

requests = Counter("privmix_requests", "Requests for a generation, refused ones included.")

ANSWERED_BY = "x-privmix-answered-by"
WRITE_INTERVAL_S = 0.05
"""Tokens of one stream within this time after its last write are written together: nobody reads faster, and a gateway
and its proxy do most of their work once a write."""
HEARTBEAT_S = 10.0
"""A stream that is silent for this long gets a comment. Proxies close idle streams after 30 s or more."""


class GenerationRoutes:
    """Implements `POST /v1/completions` and `POST /v1/chat/completions`."""

    def __init__(self, settings: RequestSettings, served: ServedModel, keys: KeyService) -> None:
        self._settings = settings
        self._served = served
        self._keys = keys

    def router(self) -> APIRouter:
        router = APIRouter(tags=["generation"])
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
        return await self._answer(request, CompletionRequest)

    async def chat_completions(self, request: Request) -> Response:
        """Answer the last message of a chat."""
        return await self._answer(request, ChatRequest)

    async def _answer(self, request: Request, kind: type[CompletionRequest | ChatRequest]) -> Response:
        requests.inc()
        identify = partial(self._keys.identify, request)
        await identify()
        with self._keys.opened(request):
            sent, identity = await read_body(request, self._settings.max_body_bytes, identify)
            salt = self._keys.cache_salt(identity)
            prepared = await prepare(kind, sent, salt, self._settings, self._served)
        body, generations, answer = prepared.body, prepared.generations, prepared.answer
        access_record(request).answer = answer
        submitted = admitted(self._served, self._keys, identity, generations, identify)
        if body.stream:
            chunks = stream_answer(
                submitted,
                answer,
                WRITE_INTERVAL_S,
                body.stream_options.include_usage,
                body.stream_options.continuous_usage_stats,
            )
            chunks = kept_alive(chunks, HEARTBEAT_S)
            # The status line waits for the first chunk, because the request can be refused until then.
            first = await unless_disconnected(request.receive, anext(chunks))
            return EventStream(first, chunks, _source_header(answer))
        response = await unless_disconnected(request.receive, complete_answer(submitted, answer))
        return Response(
            to_json(response),
            media_type="application/json",
            headers=_source_header(answer),
        )


def _source_header(answer: Answer) -> dict[str, str]:
    answered_by = answer.privmix.get("answered_by")
    return {ANSWERED_BY: answered_by} if answered_by else {}
