"""Defines all HTTP errors in OpenAI's format. No message repeats input of the client."""

import math
import re
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from privmix.foundation.errors import (
    CoordinatorError,
    CoordinatorStopping,
    Overloaded,
    WorkError,
)
from privmix.gateway.unsupported import reason
from privmix.keys.messages import InvalidKey, Refused

# The openai client retries 429 and 5xx automatically without this header.
NO_RETRY = {"x-should-retry": "false"}
RETRY_AFTER_S = 5.0
"""The wait after a failure of a part of the service, which Ray or Kubernetes replaces in seconds or minutes."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(WorkError):
    """An error response. `param` names the invalid field of the request; None if no field is invalid.

    Args:
        kind: OpenAI's type of the error; by default that of its status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or _KINDS.get(status, "invalid_request_error")
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        """Returns the error in OpenAI's format."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(param: str, message: str, code: str = "invalid_value", status: int = 400) -> ApiError:
    """Returns an error for an invalid field of the request."""
    return ApiError(status, f"{param}: {message}", code=code, param=param)


def unavailable(message: str, code: str = "service_unavailable", headers: Mapping[str, str] | None = None) -> ApiError:
    """Returns error 503: the request is valid, but a part of the service does not answer. By default, with a wait."""
    return ApiError(503, message, code=code, headers=wait_header(RETRY_AFTER_S) if headers is None else headers)


def limited(message: str, code: str, retry_after_s: float) -> ApiError:
    """Returns error 429 for a key that exceeds a limit of a gateway for a while."""
    return ApiError(429, message, code=code, headers=wait_header(retry_after_s))


def wait_header(seconds: float) -> dict[str, str]:
    """Returns the header that says when the same request can succeed: whole seconds, rounded up."""
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def generation_failed(retry_after: float | None) -> ApiError:
    """Returns the error for an answer that could not be continued.

    Args:
        retry_after: the seconds after which the same request can succeed; None if repeating it does not help.
    """
    headers = NO_RETRY if retry_after is None else wait_header(retry_after)
    return unavailable("the answer could not be completed", "generation_failed", headers)


def stopping() -> ApiError:
    return unavailable("the service is stopping", "service_stopping")


def coordinator_lost() -> ApiError:
    """Returns the error for an answer whose coordinator died and which no other coordinator continued in time."""
    return unavailable("the coordinator failed during the answer", "coordinator_lost")


def coordinators_lost() -> ApiError:
    """Returns the error for an answer during which several coordinators died. Clients must not retry: it kills more."""
    message = "several coordinators failed during the answer, which may be the cause; do not repeat the request"
    return unavailable(message, "coordinator_lost", NO_RETRY)


def unexpected() -> ApiError:
    """Returns error 500. Details are only in the log."""
    return ApiError(500, "internal error; the service's log describes it under this request id", code="internal_error")


def budget_exhausted() -> ApiError:
    return _spent(
        "the privacy budget of this ensemble is exhausted; it does not refill. See /v1/privacy",
        "privacy_budget_exhausted",
    )


def _spent(message: str, code: str) -> ApiError:
    """Returns the error for a budget that does not refill. Clients must not retry."""
    return ApiError(429, message, code=code, kind="insufficient_quota", headers=NO_RETRY)


def from_coordinator(error: CoordinatorError) -> ApiError:
    """Returns the HTTP error for a submission that the coordinator refused. None of its generations has started."""
    if isinstance(error, Overloaded):
        return limited(str(error), "overloaded", error.retry_after)
    if isinstance(error, CoordinatorStopping):
        return stopping()
    return unavailable(str(error) or "the coordinator cannot accept this request now")


def refusal(refused: Refused, generations: int) -> ApiError:
    """Returns the HTTP error for a refusal of the keys actor."""
    limit = refused.limit
    match refused.reason:
        case "request_too_large":
            message = f"prompts x n is {generations}, but a request of this key may have {limit}; send several requests"
            return invalid("n", message, "request_too_large")
        case "share_exhausted":
            return _spent("this key's share is exhausted; ask the service's administrator for more", "share_exhausted")
        case "live_streams":
            message, code = f"this key has its maximum of {limit} answers; wait until one ends", "too_many_streams"
        case "overloaded":
            message, code = "too many requests wait; try again soon", "overloaded"
    headers = {} if refused.retry_after_s is None else wait_header(refused.retry_after_s)
    return ApiError(429, message, code=code, headers=headers)


def unauthorised(refused: InvalidKey) -> ApiError:
    message = {
        "unknown": "give an API key of this service in the header: Authorization: Bearer KEY",
        "expired": "this API key has expired; ask the service's administrator for a new one",
        "revoked": "this API key was revoked; ask the service's administrator for a new one",
    }[refused.reason]
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def from_http(error: HTTPException) -> ApiError:
    """Returns the error for an unknown route or method."""
    message, code = {
        404: ("no such route; /docs lists all routes", "route_not_found"),
        405: ("this route does not allow this method; the header Allow names the allowed ones", "method_not_allowed"),
    }.get(error.status_code, ("the request was refused", "refused"))
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def from_validation(error: ValidationError) -> ApiError:
    """Returns the first of pydantic's errors without the client's input."""
    finding = error.errors(include_url=False, include_input=False)[0]
    if finding["type"] == "json_invalid":
        # The parser's reason contains a position but no content.
        return ApiError(
            400, f"the body is not JSON in UTF-8: {finding['ctx']['error']}", code="invalid_json", param="body"
        )
    param = _path(finding["loc"])
    code = _CODES.get(finding["type"]) or ("invalid_type" if finding["type"].endswith("_type") else "invalid_value")
    if finding["type"].startswith(CUSTOM):
        code = finding["type"].removeprefix(CUSTOM)
    message = _MESSAGES.get(code, finding["msg"])
    if code == "unknown_parameter" and (why := reason(str(finding["loc"][-1]))):
        code, message = "unsupported_parameter", why
    return invalid(param, message, code)


CUSTOM = "privmix."
"""Errors of our own validators have the type `CUSTOM + code`."""

_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
_MESSAGES = {
    "missing_required_parameter": "this parameter is required",
    "unknown_parameter": "no such parameter; remove it",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def _path(loc: tuple[int | str, ...]) -> str:
    """Returns a path such as `messages[0].content`. Omits keys that are not identifiers, as they could be any text."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif _NAME.fullmatch(step):
            path += f".{step}" if path else step
    return path or "body"
