"""Checks the limits of one request: its body, its choices and the length of its answer."""

from collections.abc import Sequence

from starlette.requests import Request

from services.gateway.errors import ApiError, invalid
from services.gateway.schema import GenerationRequest
from services.gateway.settings import GatewaySettings


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


def check_counts(body: GenerationRequest, prompts: int, settings: GatewaySettings) -> None:
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
    settings: GatewaySettings,
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
