"""From the body of a request to what the coordinator is asked, and the answer that grows from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from uuid import uuid4

from services import tracing
from services.coordinator.messages import Generation
from services.gateway.answers import Answer
from services.gateway.limits import answer_length, check_counts
from services.gateway.responses import ChatStyle, CompletionStyle, Style, Substituted
from services.gateway.schema import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.served import Models, Served
from services.gateway.settings import GatewaySettings

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)


@dataclass(frozen=True)
class Prepared:
    """A request that passed every check; nothing of it has begun."""

    asked: GenerationRequest
    served: Served
    generations: list[Generation]
    answer: Answer


class Preparation:
    """Validates the bodies of both generating routes, one at a time or as lines of a batch."""

    def __init__(self, settings: GatewaySettings, models: Models) -> None:
        self._settings = settings
        self._models = models

    async def prepare(self, endpoint: Endpoint, body: bytes) -> Prepared:
        """
        Raises:
            ApiError: 400 or 404 that names the first field at fault.
        """
        return await (self._chat(body) if endpoint == "/v1/chat/completions" else self._completion(body))

    async def _completion(self, body: bytes) -> Prepared:
        settings = self._settings
        asked = CompletionRequest.parse(body, settings.nearest)
        served = self._models.named(asked.model)
        check_counts(asked, len(asked.prompt), settings)
        prompts = await served.prompts.tokens(asked.prompt)
        echoes = [served.prompts.text(prompt) for prompt in asked.prompt for _ in range(asked.n)]
        style = CompletionStyle(echoes if asked.echo else None)
        return self._prepared(asked, served, prompts, style, settings.default_max_tokens)

    async def _chat(self, body: bytes) -> Prepared:
        settings = self._settings
        asked = ChatRequest.parse(body, settings.nearest)
        served = self._models.named(asked.model)
        check_counts(asked, 1, settings)
        prompts = await served.prompts.chat_tokens(asked.messages)
        return self._prepared(asked, served, prompts, ChatStyle(), settings.default_chat_max_tokens)

    def _prepared(
        self,
        asked: GenerationRequest,
        served: Served,
        prompts: Sequence[tuple[int, ...]],
        style: Style,
        default_length: int,
    ) -> Prepared:
        length = answer_length(asked, prompts, default_length, self._settings, served.ensemble.context_length)
        options = asked.options(self._settings.nearest)
        trace = tracing.traceparent()
        generations = [
            Generation(uuid4().hex, prompt, options, length, tuple(asked.stop), trace, asked.ignore_eos)
            for prompt in prompts
            for _ in range(asked.n)
        ]
        substituted = _substituted(asked, options.temperature)
        answer = Answer(style, asked.model, generations, sum(map(len, prompts)), substituted)
        return Prepared(asked, served, generations, answer)


def _substituted(asked: GenerationRequest, temperature: float) -> Substituted:
    instead = Substituted()
    if asked.greedy:
        instead["temperature"] = temperature
    if asked.seed is not None:
        instead["seed"] = "ignored"
    return instead
