"""Defines the files and batches of OpenAI's API: https://platform.openai.com/docs/api-reference/batch."""

import json
from typing import Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Ending = Literal["completed", "expired", "cancelled"]

OPEN: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class File(_Record):
    """Describes a file without its content. Times are Unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class BatchError(_Record):
    """Says why a batch failed before any line ran. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(_Record):
    object: Literal["list"] = "list"
    data: tuple[BatchError, ...]


class RequestCounts(_Record):
    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(_Record):
    cached_tokens: int = 0


class OutputTokensDetails(_Record):
    reasoning_tokens: int = 0


class BatchUsage(_Record):
    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0


class Batch(_Record):
    """Describes a batch. Times are Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Literal["/v1/completions", "/v1/chat/completions"]
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None


class LineError(_Record):
    code: str
    message: str


class LineResponse(_Record):
    """Holds the response that the same request would get outside a batch."""

    status_code: int
    request_id: str
    body: dict[str, object]


class LineResult(_Record):
    """Holds one line of an output file or an error file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    def text(self) -> str:
        """Returns the line, in ASCII: a custom id from JSON may hold half of a surrogate pair, which UTF-8 cannot.

        Raises:
            ValueError: JSON cannot represent the response.
        """
        return json.dumps(self.model_dump(mode="json"), allow_nan=False, separators=(",", ":"))


class BatchRequest(_Record):
    """Holds a client's request to create a batch. `window_s` is the completion window in seconds."""

    endpoint: Literal["/v1/completions", "/v1/chat/completions"]
    input_file_id: str
    completion_window: str
    window_s: int
    output_expires_s: int | None = None
    metadata: dict[str, str] | None = None


def new_id(prefix: str) -> str:
    """Returns a new random id with a prefix."""
    return prefix + uuid4().hex
