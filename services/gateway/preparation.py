"""Turns the body of a request into generations for the coordinator and an empty answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

from services import tracing
from services.coordinator.messages import Generation
from services.gateway.answers import Answer
from services.gateway.limits import answer_length, check_counts
from services.gateway.models import Models, ServedModel
from services.gateway.responses import AnsweringBase, ChatStyle, CompletionStyle, Style, Substituted
from services.gateway.schema import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.settings import GatewaySettings

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]


@dataclass(frozen=True)
class Prepared:
    """Holds a request that passed every check and has not started."""

    body: GenerationRequest
    served: ServedModel
    generations: list[Generation]
    answer: Answer


class Preparation:
    """Validates the bodies of both generation routes, for single requests and for lines of a batch."""

    def __init__(self, settings: GatewaySettings, models: Models) -> None:
        self._settings = settings
        self._models = models

    async def prepare(self, endpoint: Endpoint, body: bytes) -> Prepared:
        """Validates a request.

        Raises:
            ApiError: 400 or 404, which names the first invalid field.
        """
        return await (self._chat(body) if endpoint == "/v1/chat/completions" else self._completion(body))

    async def _completion(self, body: bytes) -> Prepared:
        settings = self._settings
        request = CompletionRequest.parse(body, settings.fallbacks)
        served = self._models.named(request.model)
        check_counts(request, len(request.prompt), settings)
        prompts = await served.prompts.tokens(request.prompt)
        echoes = [served.prompts.text(prompt) for prompt in request.prompt for _ in range(request.n)]
        style = CompletionStyle(echoes if request.echo else None)
        return self._prepared(request, served, prompts, style, settings.default_max_tokens)

    async def _chat(self, body: bytes) -> Prepared:
        settings = self._settings
        request = ChatRequest.parse(body, settings.fallbacks)
        served = self._models.named(request.model)
        check_counts(request, 1, settings)
        prompts = await served.prompts.chat_tokens(request.messages)
        return self._prepared(request, served, prompts, ChatStyle(), settings.default_chat_max_tokens)

    def _prepared(
        self,
        request: GenerationRequest,
        served: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        style: Style,
        default_length: int,
    ) -> Prepared:
        length = answer_length(request, prompts, default_length, self._settings, served.ensemble.context_length)
        options = request.options(self._settings.fallbacks)
        trace = tracing.traceparent()
        generations = [
            Generation(uuid4().hex, prompt, options, length, tuple(request.stop), trace, request.ignore_eos)
            for prompt in prompts
            for _ in range(request.n)
        ]
        substituted = _substituted(request, options.temperature)
        base: AnsweringBase = "base" if served.ensemble.private_base else "public"
        answer = Answer(style, request.model, generations, sum(map(len, prompts)), substituted, base)
        return Prepared(request, served, generations, answer)


def _substituted(request: GenerationRequest, temperature: float) -> Substituted:
    substituted = Substituted()
    if request.greedy:
        substituted["temperature"] = temperature
    if request.seed is not None:
        substituted["seed"] = "ignored"
    return substituted
