"""Translates what the keys actor refuses into errors and headers of HTTP."""

from privmix.foundation.errors import KeysError, KeysUnavailable
from privmix.keys.messages import InvalidKey, RateState, RateStates, Refused
from privmix.keys.records import Scope
from privmix.requests.errors import NO_RETRY, ApiError, invalid, unavailable, wait_header

RATES, LIMITED = ("limit", "remaining", "reset"), ("requests", "tokens")
"""The parts of the names of OpenAI's headers `x-ratelimit-RATE-LIMITED`."""


def refusal(refused: Refused, wanted: int, generations: int) -> ApiError:
    """Returns the HTTP error for a refusal of the keys actor."""
    headers = rate_headers(refused.rates)
    limit = refused.limit
    match refused.reason:
        case "request_too_large" | "larger_than_a_minute":
            within = "in one request" if refused.reason == "request_too_large" else "per minute"
            message = f"prompts x n x max_tokens is {wanted}, but this key may use {limit} {within}; reduce it"
            return invalid("max_tokens", message, "request_too_large")
        case "more_than_live_streams":
            message = f"prompts x n is {generations}, but this key may have {limit} concurrent answers; reduce it"
            return invalid("n", message, "request_too_large")
        case "share_exhausted":
            message = "this key's share of the privacy budget is exhausted; it does not refill"
            return ApiError(
                429, message, code="share_exhausted", kind="insufficient_quota", headers={**headers, **NO_RETRY}
            )
        case "daily_share_exhausted":
            message = "this key's tokens for today are used up; it has new ones after midnight UTC"
            code, headers = "daily_share_exhausted", {**headers, **NO_RETRY}
        case "live_streams":
            message, code = f"this key already has {limit} concurrent answers, its maximum", "too_many_streams"
        case "overloaded":
            message, code = "too many requests wait; try again soon", "overloaded"
        case "requests_per_minute" | "tokens_per_minute":
            unit = refused.reason.removesuffix("_per_minute")
            message, code = f"this key may use {limit} {unit} per minute", "rate_limit_exceeded"
    if refused.retry_after_s is not None:
        headers |= wait_header(refused.retry_after_s)
    return ApiError(429, message, code=code, kind="rate_limit_error", headers=headers)


def rate_headers(rates: RateStates) -> dict[str, str]:
    """Returns OpenAI's `x-ratelimit-*` headers for the limits that exist."""
    headers: dict[str, str] = {}
    states: dict[str, RateState | None] = {"requests": rates.requests, "tokens": rates.tokens}
    for name, state in states.items():
        if state is not None:
            values = (str(state.limit), str(state.remaining), f"{state.reset_s:.3f}s")
            headers |= {f"x-ratelimit-{rate}-{name}": value for rate, value in zip(RATES, values, strict=True)}
    return headers


def unauthorised(refused: InvalidKey) -> ApiError:
    message = {
        "unknown": "give an API key of this service in the header: Authorization: Bearer KEY",
        "expired": "this API key has expired; ask the service's administrator for a new one",
        "revoked": "this API key was revoked; ask the service's administrator for a new one",
    }[refused.reason]
    return ApiError(
        401, message, code="invalid_api_key", kind="authentication_error", headers={"www-authenticate": "Bearer"}
    )


def forbidden(scope: Scope) -> ApiError:
    message = f"this route needs a key with the scope {scope!r}; use another key"
    return ApiError(403, message, code="missing_scope", kind="permission_error")


def translated(error: KeysError) -> ApiError:
    """Returns the HTTP error for an error of the keys actor."""
    match error:
        case KeysUnavailable():
            return unavailable("the database of the keys cannot be used now")
        case _:
            return ApiError(400, str(error), code="invalid_value", param=str(error).partition(":")[0])
