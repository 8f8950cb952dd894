"""The lines of an input file: one request each, as JSON."""

import json
from dataclasses import dataclass
from typing import Any

from services.batches.records import BatchError

MOST_ERRORS = 100
MOST_ID_CHARACTERS = 512


@dataclass(frozen=True)
class Line:
    """One request; `number` counts the lines of the file from 1, `body` is what the endpoint would get."""

    number: int
    custom_id: str
    body: bytes


class _Unusable(Exception):  # noqa: N818 (the name says the state)
    pass


def read_lines(content: bytes, endpoint: str, most_lines: int) -> tuple[list[Line], list[BatchError]]:
    """Return the lines of a file and what is wrong with it; no message repeats what the client wrote.

    A body is checked later, by the endpoint: what is wrong with it ends that line alone.
    """
    lines: list[Line] = []
    errors: list[BatchError] = []
    seen: set[str] = set()
    for number, text in enumerate(content.split(b"\n"), start=1):
        if not text.strip():
            continue
        if len(lines) == most_lines:
            return [], [_error("too_many_lines", f"the file has more than {most_lines} requests; split it")]
        try:
            line = _read(number, text, endpoint)
            if line.custom_id in seen:
                raise _Unusable(
                    "duplicate_custom_id", "an earlier line has this custom_id; give each its own", "custom_id"
                )
            seen.add(line.custom_id)
            lines.append(line)
        except _Unusable as reason:
            code, message, param = reason.args
            errors.append(BatchError(code=code, message=message, line=number, param=param))
            if len(errors) == MOST_ERRORS:
                break
    if not lines and not errors:
        errors.append(_error("empty_file", "the file has no request; write one JSON object a line"))
    return lines, errors


def model_of(lines: list[Line]) -> str | None:
    """The model that all lines name, if they name one."""
    models = {json.loads(line.body).get("model") for line in lines[:MOST_ERRORS]}
    (model, *others) = models or {None}
    return model if not others and isinstance(model, str) else None


def _read(number: int, text: bytes, endpoint: str) -> Line:
    try:
        request: Any = json.loads(text.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError):
        raise _Unusable("invalid_json_line", "this line is no JSON object in UTF-8", None) from None
    if not isinstance(request, dict):
        raise _Unusable("invalid_json_line", "this line is no JSON object", None)
    for field in ("custom_id", "method", "url", "body"):
        if field not in request:
            raise _Unusable("missing_required_parameter", f"{field}: this field is required", field)
    custom_id, body = request["custom_id"], request["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MOST_ID_CHARACTERS:
        raise _Unusable("invalid_custom_id", f"custom_id: give 1 to {MOST_ID_CHARACTERS} characters", "custom_id")
    if request["method"] != "POST":
        raise _Unusable("invalid_method", "method: use POST", "method")
    if request["url"] != endpoint:
        raise _Unusable("mismatched_endpoint", f"url: use the endpoint of the batch, {endpoint}", "url")
    if not isinstance(body, dict):
        raise _Unusable("invalid_body", "body: give the JSON object that the endpoint takes", "body")
    return Line(number, custom_id, json.dumps(body).encode())


def _error(code: str, message: str) -> BatchError:
    return BatchError(code=code, message=message, param="input_file_id")
