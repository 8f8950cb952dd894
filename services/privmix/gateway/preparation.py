"""Reads the body of a request, checks its limits, and turns it into generations for the coordinator and an answer."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

from starlette.requests import Request

from privmix.coordinator.messages import Generation
from privmix.gateway.answers import Answer, ChatStyle, CompletionStyle, Json, Style
from privmix.gateway.errors import invalid
from privmix.gateway.schema import ChatRequest, CompletionRequest, GenerationRequest
from privmix.gateway.served_model import ServedModel
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
        raise invalid("body", "it is compressed; send it without content-encoding", "unsupported_encoding", 415)
    declared = request.headers.get("content-length", "0")
    if len(declared) > MAX_DIGITS or not (declared.isascii() and declared.isdecimal()):
        raise invalid("content-length", "give a number of bytes")
    too_large = invalid("body", f"it is larger than {limit} bytes; make it smaller", "body_too_large", 413)
    if int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        message = f"it was not complete within {BODY_S:g} s; send it faster, or make it smaller"
        raise invalid("body", message, "body_too_slow", 408) from None
    if body and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        message = "send it as JSON, with the header content-type: application/json"
        raise invalid("body", message, "unsupported_media_type", 415)
    return bytes(body), await identify()


@dataclass(frozen=True)
class Prepared:
    """Holds a request that passed every check and has not started."""

    body: GenerationRequest
    generations: list[Generation]
    answer: Answer


async def prepare(
    kind: type[CompletionRequest | ChatRequest],
    sent: bytes,
    cache_salt: str,
    settings: RequestSettings,
    served: ServedModel,
) -> Prepared:
    """Validates the body of a generation route.

    Args:
        cache_salt: the salt of what is kept for the request's key (`KeyService.cache_salt`).

    Raises:
        ApiError: 400 or 404, which names the first invalid field.
    """
    request = kind.parse(sent, settings)
    served.check_name(request.model)
    if request.n > settings.max_n:
        raise invalid("n", f"request at most {settings.max_n} choices")
    context = served.ensemble.context_length
    if isinstance(request, ChatRequest):
        style: Style = ChatStyle()
        prompts = await served.prompts.chat_tokens(request.messages, context, cache_salt)
    else:
        if len(request.prompt) > settings.max_prompts:
            raise invalid("prompt", f"give at most {settings.max_prompts} prompts in one request")
        prompts = await served.prompts.tokens(request.prompt, context, cache_salt)
        echoed = [await served.prompts.text(prompt, cache_salt) for prompt in request.prompt] if request.echo else []
        style = CompletionStyle([text for text in echoed for _ in range(request.n)])
    structure = await structure_of(request, len(prompts) * request.n, served.prompts.compiler, cache_salt)
    longest = max(map(len, prompts))
    length = answer_length(request, longest, settings.max_tokens, context)
    if structure is not None:
        check_shortest(request, structure, length, min(settings.max_tokens, context - longest))
    options = request.options(settings)
    stops = request.stop if structure is None or structure.has_stops else []
    grammar = None if structure is None else structure.grammar
    generations = [
        Generation(uuid4().hex, prompt, options, length, tuple(stops), request.ignore_eos, grammar=grammar)
        for prompt in prompts
        for _ in range(request.n)
    ]
    substituted: Json = {"temperature": options.temperature} if request.greedy else {}
    if request.seed is not None:
        substituted["seed"] = "ignored"
    if request.stop != stops:
        substituted["stop"] = "ignored"
    base = "base" if served.ensemble.private_base else "public"
    answer = Answer(style, request.model, generations, sum(map(len, prompts)), substituted, base)
    return Prepared(request, generations, answer)


def answer_length(body: GenerationRequest, prompt: int, most: int, context: int) -> int:
    """Returns the maximal number of tokens of each answer, so that prompt and answer fit the model's context.

    A long prompt and the settings reduce the default. They do not reduce a limit that the client sets.

    Args:
        prompt: the tokens of the longest prompt.
        most: the most tokens of an answer.

    Raises:
        ApiError: 400, the prompt or the client's limit is too long.
    """
    if prompt >= context:
        message = f"{prompt} tokens leave no space for an answer in the model's context of {context}"
        raise invalid(body.prompt_field, message, "context_length_exceeded")
    field, wanted = body.token_limit
    if wanted is None:
        return min(body.default_tokens, most, context - prompt)
    if wanted > most:
        raise invalid(field, f"request at most {most} tokens")
    if wanted > context - prompt:
        message = f"{wanted} tokens after a prompt of {prompt} exceed the model's context of {context}"
        raise invalid(field, f"{message}; request at most {context - prompt}", "context_length_exceeded")
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
