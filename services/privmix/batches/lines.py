"""Reads the lines of an input file. Each line is one request as JSON."""

import json
from dataclasses import dataclass
from typing import Any, TypeGuard

from privmix.batches.records import BatchError

MAX_ERRORS = 100
MAX_ID_CHARACTERS = 512


@dataclass(frozen=True)
class Line:
    """Holds one request. `number` counts the lines of the file from 1; `body` is the request body of the endpoint.

    It is written as shortly as JSON allows: except for some numbers, it is no larger than in the file.
    """

    number: int
    custom_id: str
    body: bytes


class _InvalidLineError(Exception):
    """A line cannot be used. Its arguments are code, message and param."""


def read_lines(content: bytes, endpoint: str, most_lines: int) -> tuple[list[Line], list[BatchError]]:
    """Returns the lines of a file and its errors. No message repeats text of the file.

    Bodies are not checked here: an invalid body fails only its line, when the line is run.
    """
    lines: list[Line] = []
    errors: list[BatchError] = []
    custom_ids: set[str] = set()
    for number, text in enumerate(content.split(b"\n"), start=1):
        if not text.strip():
            continue
        if len(lines) == most_lines:
            return [], [_error("too_many_lines", f"the file has more than {most_lines} requests; split it")]
        try:
            line = _read(number, text, endpoint)
            if line.custom_id in custom_ids:
                raise _InvalidLineError(
                    "duplicate_custom_id", "an earlier line has the same custom_id; make them unique", "custom_id"
                )
            custom_ids.add(line.custom_id)
            lines.append(line)
        except _InvalidLineError as reason:
            code, message, param = reason.args
            errors.append(BatchError(code=code, message=message, line=number, param=param))
            if len(errors) == MAX_ERRORS:
                break
    if not lines and not errors:
        errors.append(_error("empty_file", "the file has no request; write one JSON object per line"))
    return lines, errors


def model_of(lines: list[Line]) -> str | None:
    """Returns the model that the first lines name; None if they differ."""
    models = [json.loads(line.body).get("model") for line in lines[:MAX_ERRORS]]
    model = models[0] if models else None
    return model if all(other == model for other in models) and _is_name(model) else None


def _is_name(model: Any) -> TypeGuard[str]:
    """Returns whether a record can hold this model. If not, each line fails, as it names no model."""
    return isinstance(model, str) and len(model) <= MAX_ID_CHARACTERS and model.isprintable()


def _read(number: int, text: bytes, endpoint: str) -> Line:
    try:
        request: Any = json.loads(text.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError):
        raise _InvalidLineError("invalid_json_line", "this line is not a JSON object in UTF-8", None) from None
    if not isinstance(request, dict):
        raise _InvalidLineError("invalid_json_line", "this line is not a JSON object", None)
    for field in ("custom_id", "method", "url", "body"):
        if field not in request:
            raise _InvalidLineError("missing_required_parameter", f"{field}: this field is required", field)
    custom_id, body = request["custom_id"], request["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARACTERS:
        raise _InvalidLineError(
            "invalid_custom_id", f"custom_id: give 1 to {MAX_ID_CHARACTERS} characters", "custom_id"
        )
    if request["method"] != "POST":
        raise _InvalidLineError("invalid_method", "method: use POST", "method")
    if request["url"] != endpoint:
        raise _InvalidLineError("mismatched_endpoint", f"url: use the endpoint of the batch, {endpoint}", "url")
    if not isinstance(body, dict):
        raise _InvalidLineError("invalid_body", "body: give the JSON object that the endpoint expects", "body")
    try:
        return Line(number, custom_id, _written(body))
    except RecursionError:
        raise _InvalidLineError("invalid_body", "body: its values are nested too deeply", "body") from None


def _written(body: dict[str, Any]) -> bytes:
    separators = (",", ":")
    try:
        return json.dumps(body, ensure_ascii=False, separators=separators).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return json.dumps(body, separators=separators).encode()


def _error(code: str, message: str) -> BatchError:
    return BatchError(code=code, message=message, param="input_file_id")
