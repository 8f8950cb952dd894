"""Turns the body of a request into generations for the coordinator and an empty answer, and checks its limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

from starlette.requests import Request

from services import tracing
from services.coordinator.messages import Generation
from services.requests.answers import Answer, AnsweringBase, ChatStyle, CompletionStyle, Style, Substituted, ToolStyle
from services.requests.errors import ApiError, invalid
from services.requests.models import Models, ServedModel
from services.requests.schema import ChatRequest, CompletionRequest, GenerationRequest
from services.requests.settings import RequestSettings
from services.requests.structure import grammar_of


async def read_body(request: Request, limit: int) -> bytes:
    """Reads the body of a request, but not more than `limit` bytes.

    Raises:
        ApiError: 413, the body exceeds the limit; 415, it is compressed.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "the body must not be compressed", code="unsupported_encoding", param="body")
    declared = request.headers.get("content-length", "")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large", param="body")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def check_counts(body: GenerationRequest, prompts: int, settings: RequestSettings) -> None:
    """Checks the numbers of choices and prompts.

    Raises:
        ApiError: 400, one of them exceeds its limit.
    """
    if body.n > settings.max_n:
        raise invalid("n", f"request at most {settings.max_n} choices")
    if prompts > settings.max_prompts:
        raise invalid(body.prompt_field, f"give at most {settings.max_prompts} prompts in one request")


def answer_length(
    body: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    default: int,
    settings: RequestSettings,
    context_length: int,
) -> int:
    """Returns the maximal number of tokens of each answer, so that prompt and answer fit the model's context.

    A long prompt and the settings reduce the default. They do not reduce a limit that the client sets.

    Raises:
        ApiError: 400, the prompt or the client's limit is too long.
    """
    longest = max(map(len, prompts))
    available = context_length - longest
    if available < 1:
        raise invalid(
            body.prompt_field,
            f"{longest} tokens leave no space for an answer in the model's context of {context_length}",
            "context_length_exceeded",
        )
    field, wanted = body.token_limit
    if wanted is None:
        return min(default, settings.max_tokens, available)
    if wanted > settings.max_tokens:
        raise invalid(field, f"request at most {settings.max_tokens} tokens")
    if wanted > available:
        raise invalid(
            field,
            f"{wanted} tokens after a prompt of {longest} exceed the model's context of "
            f"{context_length}; request at most {available}",
            "context_length_exceeded",
        )
    return wanted


Endpoint = Literal["/v1/completions", "/v1/chat/completions"]

COMPLETION_TOKENS, CHAT_TOKENS = 16, 256
"""The length of an answer if the client sets none, as OpenAI's for completions. An unlimited chat could spend the whole
budget. `max_tokens` of the configuration and the model's context reduce them."""


@dataclass(frozen=True)
class Prepared:
    """Holds a request that passed every check and has not started."""

    body: GenerationRequest
    served: ServedModel
    generations: list[Generation]
    answer: Answer


class Preparation:
    """Validates the bodies of both generation routes, for single requests and for lines of a batch."""

    def __init__(self, settings: RequestSettings, models: Models) -> None:
        self._settings = settings
        self._models = models

    async def prepare(self, endpoint: Endpoint, body: bytes, cache_salt: str) -> Prepared:
        """Validates a request.

        Args:
            cache_salt: the salt of what is kept for the request's key (`KeyService.cache_salt`).

        Raises:
            ApiError: 400 or 404, which names the first invalid field.
        """
        prepare = self._chat if endpoint == "/v1/chat/completions" else self._completion
        return await prepare(body, cache_salt)

    async def _completion(self, body: bytes, cache_salt: str) -> Prepared:
        settings = self._settings
        request = CompletionRequest.parse(body, settings.fallbacks)
        served = self._models.named(request.model)
        check_counts(request, len(request.prompt), settings)
        prompts = await served.prompts.tokens(request.prompt, served.ensemble.context_length, cache_salt)
        grammar = await grammar_of(request, len(prompts) * request.n, served.prompts.trials, cache_salt)
        echoed = [await served.prompts.text(prompt, cache_salt) for prompt in request.prompt] if request.echo else None
        style = CompletionStyle(echoed and [text for text in echoed for _ in range(request.n)])
        return self._prepared(request, served, prompts, style, COMPLETION_TOKENS, grammar)

    async def _chat(self, body: bytes, cache_salt: str) -> Prepared:
        settings = self._settings
        request = ChatRequest.parse(body, settings.fallbacks)
        served = self._models.named(request.model)
        check_counts(request, 1, settings)
        tools = request.callable_tools
        prompts = await served.prompts.chat_tokens(request.messages, served.ensemble.context_length, cache_salt, tools)
        grammar = await grammar_of(request, request.n, served.prompts.trials, cache_salt)
        style = ToolStyle([tool.name for tool in tools]) if tools else ChatStyle()
        return self._prepared(request, served, prompts, style, CHAT_TOKENS, grammar)

    def _prepared(
        self,
        request: GenerationRequest,
        served: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        style: Style,
        default_length: int,
        grammar: str | None,
    ) -> Prepared:
        length = answer_length(request, prompts, default_length, self._settings, served.ensemble.context_length)
        options = request.options(self._settings.fallbacks)
        trace = tracing.traceparent()
        generations = [
            Generation(
                uuid4().hex,
                prompt,
                options,
                length,
                tuple(request.stop),
                trace,
                request.ignore_eos,
                grammar=grammar,
            )
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
