"""Translates what the keys actor refuses into errors of HTTP."""

from privmix.foundation.errors import KeysError, KeysUnavailable
from privmix.gateway.errors import NO_RETRY, ApiError, invalid, unavailable, wait_header
from privmix.keys.messages import InvalidKey, Refused
from privmix.keys.records import Scope


def refusal(refused: Refused, generations: int) -> ApiError:
    """Returns the HTTP error for a refusal of the keys actor."""
    limit, headers = refused.limit, {}
    match refused.reason:
        case "more_than_live_streams":
            message = f"prompts x n is {generations}, but this key may have {limit} concurrent answers; reduce it"
            return invalid("n", message, "request_too_large")
        case "share_exhausted":
            message = "this key's share of the privacy budget is exhausted; it does not refill"
            return ApiError(429, message, code="share_exhausted", kind="insufficient_quota", headers=NO_RETRY)
        case "daily_share_exhausted":
            message = "this key's tokens for today are used up; it has new ones after midnight UTC"
            code, headers = "daily_share_exhausted", NO_RETRY
        case "live_streams":
            message, code = f"this key already has {limit} concurrent answers, its maximum", "too_many_streams"
        case "overloaded":
            message, code = "too many requests wait; try again soon", "overloaded"
    if refused.retry_after_s is not None:
        headers = headers | wait_header(refused.retry_after_s)
    return ApiError(429, message, code=code, kind="rate_limit_error", headers=headers)


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
