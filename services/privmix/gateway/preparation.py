"""Turns the body of a request into generations for the coordinator and an empty answer, and checks its limits."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar
from uuid import uuid4

from starlette.requests import Request

from privmix.coordinator.messages import Generation
from privmix.gateway.answers import (
    Answer,
    AnsweringBase,
    ChatStyle,
    CompletionStyle,
    Style,
    Substituted,
)
from privmix.gateway.errors import ApiError, body_too_large, invalid
from privmix.gateway.models import ServedModel
from privmix.gateway.schema import ChatRequest, CompletionRequest, GenerationRequest
from privmix.gateway.settings import RequestSettings
from privmix.gateway.structure import Structure, structure_of

MAX_DIGITS = 15
"""The conversion of a number takes Python a time that grows with the square of its digits."""
BODY_S = 60.0
"""The time for the body of a request. A body that a client holds back takes one of a gateway's places."""

T = TypeVar("T")


async def read_body(request: Request, limit: int, identify: Callable[[], Awaitable[T]]) -> tuple[bytes, T]:
    """Reads the body of a request, but not more than `limit` bytes.

    Args:
        identify: identifies the client again once the body is here: its key may have been revoked meanwhile.

    Returns:
        The body, and what `identify` returns.

    Raises:
        ApiError: 400, its length is not a number; 408, it is too slow; 413, it exceeds the limit; 415, it is
            compressed, or not sent as JSON. A web page cannot send JSON to another origin without asking the service
            first.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "the body must not be compressed", code="unsupported_encoding", param="body")
    if _declared_bytes(request) > limit:
        raise body_too_large(limit)
    body = bytearray()
    async with in_time(BODY_S):
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise body_too_large(limit)
    if body and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            "send the body as JSON, with the header content-type: application/json",
            code="unsupported_media_type",
            param="body",
        )
    return bytes(body), await identify()


def _declared_bytes(request: Request) -> int:
    """Returns the length of the body that the header `content-length` declares; 0 without one."""
    declared = request.headers.get("content-length", "0")
    if len(declared) <= MAX_DIGITS and declared.isascii() and declared.isdecimal():
        return int(declared)
    raise invalid("content-length", "give a number of bytes")


@asynccontextmanager
async def in_time(seconds: float) -> AsyncIterator[None]:
    """Limits the time in which a body is read.

    Raises:
        ApiError: 408, it is over.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        message = f"the body was not complete within {seconds:g} s; send it faster, or make it smaller"
        raise ApiError(408, message, code="body_too_slow", param="body") from None


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


def check_shortest(body: GenerationRequest, structure: Structure, length: int, most: int) -> None:
    """Checks that an answer of a structure fits into its tokens, before any of them is charged.

    Args:
        length: see `answer_length`.
        most: the maximal length of an answer after these prompts.

    Raises:
        ApiError: 400, it does not fit.
    """
    if structure.shortest > most:
        message = f"the shortest answer that was found has {structure.shortest} tokens, and there is space for {most}"
        raise invalid(structure.field, f"{message}; make the structure smaller or the prompt shorter")
    if structure.shortest > length:
        message = f"{length} tokens are too few for {structure.field}, which needs {structure.shortest}"
        raise invalid(body.token_limit[0], f"{message}; request at least {structure.shortest}")


Route = Literal["/v1/completions", "/v1/chat/completions"]

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
    """Validates the bodies of the generation routes."""

    def __init__(self, settings: RequestSettings, served: ServedModel) -> None:
        self._settings = settings
        self._served = served

    async def prepare(self, endpoint: Route, body: bytes, cache_salt: str) -> Prepared:
        """Validates a request.

        Args:
            cache_salt: the salt of what is kept for the request's key (`KeyService.cache_salt`).

        Raises:
            ApiError: 400 or 404, which names the first invalid field.
        """
        match endpoint:
            case "/v1/completions":
                return await self._completion(body, cache_salt)
            case "/v1/chat/completions":
                return await self._chat(ChatRequest.parse(body, self._settings.fallbacks), cache_salt)

    async def _completion(self, body: bytes, cache_salt: str) -> Prepared:
        settings = self._settings
        request = CompletionRequest.parse(body, settings.fallbacks)
        served = self._served
        served.check_name(request.model)
        check_counts(request, len(request.prompt), settings)
        prompts = await served.prompts.tokens(request.prompt, served.ensemble.context_length, cache_salt)
        structure = await structure_of(request, len(prompts) * request.n, served.prompts.compiler, cache_salt)
        echoed = [await served.prompts.text(prompt, cache_salt) for prompt in request.prompt] if request.echo else None
        style = CompletionStyle(echoed and [text for text in echoed for _ in range(request.n)])
        return self._prepared(request, served, prompts, style, COMPLETION_TOKENS, structure)

    async def _chat(self, request: ChatRequest, cache_salt: str) -> Prepared:
        served = self._served
        served.check_name(request.model)
        check_counts(request, 1, self._settings)
        prompts = await served.prompts.chat_tokens(request.messages, served.ensemble.context_length, cache_salt)
        structure = await structure_of(request, request.n, served.prompts.compiler, cache_salt)
        return self._prepared(request, served, prompts, ChatStyle(), CHAT_TOKENS, structure)

    def _prepared(
        self,
        request: GenerationRequest,
        served: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        style: Style,
        default_length: int,
        structure: Structure | None,
    ) -> Prepared:
        length = answer_length(request, prompts, default_length, self._settings, served.ensemble.context_length)
        if structure is not None:
            most = min(self._settings.max_tokens, served.ensemble.context_length - max(map(len, prompts)))
            check_shortest(request, structure, length, most)
        options = request.options(self._settings.fallbacks)
        generations = [
            Generation(
                uuid4().hex,
                prompt,
                options,
                length,
                tuple(request.stop) if structure is None or structure.has_stops else (),
                request.ignore_eos,
                grammar=None if structure is None else structure.grammar,
            )
            for prompt in prompts
            for _ in range(request.n)
        ]
        substituted = _substituted(request, options.temperature, structure)
        base: AnsweringBase = "base" if served.ensemble.private_base else "public"
        answer = Answer(style, request.model, generations, sum(map(len, prompts)), substituted, base)
        return Prepared(request, served, generations, answer)


def _substituted(request: GenerationRequest, temperature: float, structure: Structure | None) -> Substituted:
    substituted = Substituted()
    if request.greedy:
        substituted["temperature"] = temperature
    if request.seed is not None:
        substituted["seed"] = "ignored"
    if request.stop and structure is not None and not structure.has_stops:
        substituted["stop"] = "ignored"
    return substituted
