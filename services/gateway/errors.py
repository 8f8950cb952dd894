"""Every failure in OpenAI's shape. No message repeats what the client sent."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from services.coordinator.messages import CoordinatorError, Overloaded

# The openai client retries 429 and 5xx by itself unless it is told not to.
NO_RETRY = {"x-should-retry": "false"}
DRAINING_S = "60"


class ApiError(Exception):
    """A failure as the client sees it; `param` names the field of the request that is at fault, if one is."""

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
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field of the request that cannot be served as it is."""
    return ApiError(400, f"{param}: {message}", code=code, param=param)


def unavailable(message: str, code: str = "service_unavailable", headers: Mapping[str, str] | None = None) -> ApiError:
    """Nothing is wrong with the request; a part of the service does not answer."""
    return ApiError(503, message, code=code, kind="server_error", headers=headers)


def generation_failed(retry_after: float | None) -> ApiError:
    """The ensemble could not continue an answer. Tokens that were not released were not charged.

    Args:
        retry_after: in how many seconds the same request can succeed; None where a repetition does not help.
    """
    headers = NO_RETRY if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}
    return unavailable("the answer could not be completed", "generation_failed", headers)


def coordinator_lost() -> ApiError:
    """The coordinator was lost while it answered, and no other one went on in time."""
    return unavailable("the coordinator was lost while it answered", "coordinator_lost")


def budget_exhausted() -> ApiError:
    return ApiError(
        429,
        "the privacy budget of this ensemble is used up; it does not come back with time. See /v1/privacy",
        code="privacy_budget_exhausted",
        kind="insufficient_quota",
        headers=NO_RETRY,
    )


def model_not_found(served: Sequence[str]) -> ApiError:
    message = f"model: there is no such model; served here: {', '.join(served) or 'none now'}"
    return ApiError(404, message, code="model_not_found", param="model")


def draining(name: str) -> ApiError:
    """The ensemble ends its requests before it is retired."""
    message = f"model: {name} takes no new requests, because it is about to be retired; /v1/models lists the others"
    return ApiError(
        503, message, code="model_draining", param="model", kind="server_error", headers={"retry-after": DRAINING_S}
    )


def from_coordinator(error: CoordinatorError) -> ApiError:
    """The refusal of a submission. None of its generations has begun."""
    if isinstance(error, Overloaded):
        retry_after = {"retry-after": str(max(1, round(error.retry_after)))}
        return ApiError(429, str(error), code="overloaded", kind="rate_limit_error", headers=retry_after)
    return unavailable(str(error) or "the coordinator cannot take this request now")


def from_http(error: HTTPException) -> ApiError:
    """A refusal by the router: there is no such route, or not with this method."""
    message, code = {
        404: ("there is no such route; /docs lists those that there are", "route_not_found"),
        405: ("this route does not take this method; the header Allow names those it takes", "method_not_allowed"),
    }.get(error.status_code, ("the request was refused", "refused"))
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def unexpected() -> ApiError:
    return ApiError(500, "an internal error; the log has it under this request id", code="internal_error",
                    kind="server_error")  # fmt: skip


def from_validation(error: ValidationError) -> ApiError:
    """The first of pydantic's findings, without the input that pydantic would show."""
    finding = error.errors(include_url=False, include_input=False)[0]
    if finding["type"] == "json_invalid":
        return _not_json(finding)
    param = _path(finding["loc"])
    code = _CODES.get(finding["type"]) or ("invalid_type" if finding["type"].endswith("_type") else "invalid_value")
    if finding["type"].startswith(CUSTOM):
        code = finding["type"].removeprefix(CUSTOM)
    message = _MESSAGES.get(code, finding["msg"])
    return invalid(param, message, code)


CUSTOM = "privmix."
"""Findings of our own validators have the type `CUSTOM + code`."""

_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
_MESSAGES = {
    "missing_required_parameter": "this parameter is required",
    "unknown_parameter": "there is no such parameter; remove it",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def _not_json(finding: Mapping[str, Any]) -> ApiError:
    """jiter's reason has a position and no content."""
    return ApiError(400, f"the body is not JSON in UTF-8: {finding['ctx']['error']}", code="invalid_json", param="body")


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content`; a key of the client's own that is no name is left out, since it could be any text."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif _NAME.fullmatch(step):
            path += f".{step}" if path else step
    return path or "body"
