"""Defines all HTTP errors in OpenAI's format. No message repeats input of the client."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from privmix.foundation.errors import CoordinatorError, CoordinatorStopping, Overloaded, WorkError
from privmix.gateway.unsupported import reason

# The openai client retries 429 and 5xx automatically without this header.
NO_RETRY = {"x-should-retry": "false"}


class ApiError(WorkError):
    """An error response. `param` names the invalid field of the request; None if no field is invalid."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the body of the response in OpenAI's format."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Returns error 400 for an invalid field of the request."""
    return ApiError(400, f"{param}: {message}", code=code, param=param)


def body_too_large(limit: int) -> ApiError:
    """Returns error 413 for a body of more than `limit` bytes."""
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large", param="body")


def unavailable(message: str, code: str = "service_unavailable", headers: Mapping[str, str] | None = None) -> ApiError:
    """Returns error 503: the request is valid, but a part of the service does not answer."""
    return ApiError(503, message, code=code, kind="server_error", headers=headers)


def limited(message: str, code: str, retry_after_s: float) -> ApiError:
    """Returns error 429 for a key that exceeds a limit of a gateway for a while."""
    return ApiError(429, message, code=code, kind="rate_limit_error", headers=wait_header(retry_after_s))


def wait_header(seconds: float) -> dict[str, str]:
    """Returns the header that says when the same request can succeed: whole seconds, rounded up."""
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def generation_failed(retry_after: float | None) -> ApiError:
    """Returns the error for an answer that could not be continued.

    Args:
        retry_after: the seconds after which the same request can succeed; None if repeating it does not help.
    """
    headers = NO_RETRY if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}
    return unavailable("the answer could not be completed", "generation_failed", headers)


def stopping() -> ApiError:
    """Returns the error for an answer that a stop of the service ends."""
    return unavailable("the service is stopping", "service_stopping")


def coordinator_lost() -> ApiError:
    """Returns the error for an answer whose coordinator died and which no other coordinator continued in time."""
    return unavailable("the coordinator failed during the answer", "coordinator_lost")


def coordinators_lost() -> ApiError:
    """Returns the error for an answer during which several coordinators died. Clients must not retry: it kills more."""
    message = "several coordinators failed during the answer, which may be the cause; do not repeat the request"
    return unavailable(message, "coordinator_lost", NO_RETRY)


def budget_exhausted() -> ApiError:
    """Returns the error for an exhausted privacy budget. Clients must not retry."""
    return ApiError(
        429,
        "the privacy budget of this ensemble is exhausted; it does not refill. See /v1/privacy",
        code="privacy_budget_exhausted",
        kind="insufficient_quota",
        headers=NO_RETRY,
    )


def model_not_found(served: Sequence[str]) -> ApiError:
    """Returns error 404 with the names of the served models."""
    message = f"model: no such model; this service has: {', '.join(served) or 'none at the moment'}"
    return ApiError(404, message, code="model_not_found", param="model")


def from_coordinator(error: CoordinatorError) -> ApiError:
    """Returns the HTTP error for a submission that the coordinator refused. None of its generations has started."""
    if isinstance(error, Overloaded):
        retry_after = {"retry-after": str(max(1, round(error.retry_after)))}
        return ApiError(429, str(error), code="overloaded", kind="rate_limit_error", headers=retry_after)
    if isinstance(error, CoordinatorStopping):
        return stopping()
    return unavailable(str(error) or "the coordinator cannot accept this request now")


def from_http(error: HTTPException) -> ApiError:
    """Returns the error for an unknown route or method."""
    message, code = {
        404: ("no such route; /docs lists all routes", "route_not_found"),
        405: ("this route does not allow this method; the header Allow names the allowed ones", "method_not_allowed"),
    }.get(error.status_code, ("the request was refused", "refused"))
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def unexpected() -> ApiError:
    """Returns error 500. Details are only in the log."""
    return ApiError(500, "internal error; the service's log describes it under this request id", code="internal_error",
                    kind="server_error")  # fmt: skip


def from_validation(error: ValidationError) -> ApiError:
    """Returns the first of pydantic's errors without the client's input."""
    finding = error.errors(include_url=False, include_input=False)[0]
    if finding["type"] == "json_invalid":
        return _not_json(finding)
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


def _not_json(finding: Mapping[str, Any]) -> ApiError:
    """Returns the error for invalid JSON. The parser's reason contains a position but no content."""
    return ApiError(400, f"the body is not JSON in UTF-8: {finding['ctx']['error']}", code="invalid_json", param="body")


def _path(loc: tuple[int | str, ...]) -> str:
    """Returns a path such as `messages[0].content`. Omits keys that are not identifiers, as they could be any text."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif _NAME.fullmatch(step):
            path += f".{step}" if path else step
    return path or "body"
