"""What one request may ask for."""

from collections.abc import Sequence

from starlette.requests import Request

from services.gateway.errors import ApiError, invalid
from services.gateway.schema import GenerationRequest
from services.gateway.settings import GatewaySettings


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request, read no further than `limit` bytes.

    Raises:
        ApiError: 413 beyond the limit, 415 for a compressed body.
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


def check_counts(asked: GenerationRequest, prompts: int, settings: GatewaySettings) -> None:
    if asked.n > settings.max_n:
        raise invalid("n", f"at most {settings.max_n} choices")
    if prompts > settings.max_prompts:
        raise invalid(asked.prompt_field, f"at most {settings.max_prompts} prompts in one request")


def answer_length(
    asked: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    default: int,
    settings: GatewaySettings,
    context_length: int,
) -> int:
    """How many tokens each answer may have, so that prompt and answer fit the model's context.

    The default gives way to a long prompt and to the settings; a limit that the client set does not.
    """
    longest = max(map(len, prompts))
    room = context_length - longest
    if room < 1:
        raise invalid(
            asked.prompt_field,
            f"{longest} tokens leave no room for an answer in the model's context of {context_length}",
            "context_length_exceeded",
        )
    field, wanted = asked.token_limit
    if wanted is None:
        return min(default, settings.max_tokens, room)
    if wanted > settings.max_tokens:
        raise invalid(field, f"at most {settings.max_tokens} tokens")
    if wanted > room:
        raise invalid(
            field,
            f"{wanted} tokens after a prompt of {longest} are more than the model's context of "
            f"{context_length}; ask for at most {room}",
            "context_length_exceeded",
        )
    return wanted
