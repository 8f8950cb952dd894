"""Formats answers of `POST /v1/responses`, whole and as the events of a stream.

Source: the OpenAI API reference (responses, streaming), and the types of the package `openai`.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field

from privmix.requests.answers import (
    ApiFinishReason,
    Frame,
    FunctionCall,
    PartialCall,
    Piece,
    Privmix,
    Style,
    Usage,
    absent,
    begins_call,
)
from privmix.requests.errors import ApiError
from privmix.requests.responses.schema import ResponsesRequest

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class InputDetails(BaseModel):
    """Always zero: whether a prompt was cached is not told."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """The numbers of tokens. `free_tokens` is as in `Usage`."""

    input_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int
    free_tokens: int | None = Field(default=None, exclude_if=absent)

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        return cls(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            free_tokens=usage.free_tokens,
        )


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(BaseModel):
    """The text of a response."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputCall(BaseModel):
    """The call of a response."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class IncompleteDetails(BaseModel):
    """Any limit on tokens is `max_output_tokens`; `privmix.ended_by` names the others."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(BaseModel):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class Response(BaseModel):
    """A response. The fields of the request are repeated, as by OpenAI; nothing is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    background: bool = False
    metadata: dict[str, str] = {}
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    privmix: Privmix | None = Field(default=None, exclude_if=absent)


class ResponseEvent(BaseModel):
    """One event of a stream. It has the fields that OpenAI's event of this type has."""

    type: str
    sequence_number: int
    response: Response | None = Field(default=None, exclude_if=absent)
    output_index: int | None = Field(default=None, exclude_if=absent)
    item_id: str | None = Field(default=None, exclude_if=absent)
    content_index: int | None = Field(default=None, exclude_if=absent)
    item: OutputMessage | OutputCall | None = Field(default=None, exclude_if=absent)
    part: OutputText | None = Field(default=None, exclude_if=absent)
    delta: str | None = Field(default=None, exclude_if=absent)
    text: str | None = Field(default=None, exclude_if=absent)
    arguments: str | None = Field(default=None, exclude_if=absent)
    logprobs: list[Any] | None = Field(default=None, exclude_if=absent)
    code: str | None = Field(default=None, exclude_if=absent)
    message: str | None = Field(default=None, exclude_if=absent)
    param: str | None = Field(default=None, exclude_if=absent)


class Events(BaseModel):
    """The events that a piece of an answer becomes."""

    events: list[ResponseEvent]


class ResponsesStyle(Style):
    """Formats the answer to one request. A response has one item of output: a message or a call.

    Keeps what a stream has sent so far, because its last events repeat it.
    """

    id_prefix = "resp_"
    done = b""

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self._names = [tool.name for tool in request.callable_tools]
        self._frame: Frame | None = None
        self._call = PartialCall(self._names)
        self._item: OutputMessage | OutputCall | None = None
        self._reason: ApiFinishReason | None = None
        self._privmix: Privmix | None = None
        self._events = 0

    def complete(self, frame: Frame, pieces: Sequence[Piece], usage: Usage, privmix: Privmix | None) -> Response:
        (piece,) = pieces
        self._grow(piece)
        self._end(piece.ended, privmix)
        return self._response(frame, _response_status(self._reason), usage)

    def opening(self, frame: Frame, index: int) -> Events:
        self._frame = frame
        begun = self._response(frame, "in_progress")
        return Events(
            events=[self._event(kind, response=begun) for kind in ("response.created", "response.in_progress")]
        )

    def chunk(self, frame: Frame, piece: Piece, privmix: Privmix | None) -> Events:
        is_new = self._item is None
        delta = self._grow(piece)
        events = [*self._beginning()] if is_new and self._item else []
        if self._item and delta:
            events.append(self._delta(self._item, delta))
        if piece.ended:
            self._end(piece.ended, privmix)
            events += self._ending()
        elif privmix:
            self._privmix = privmix
        return Events(events=events)

    def closing(self, frame: Frame, usage: Usage) -> Events:
        status = _response_status(self._reason)
        return Events(events=[self._event(f"response.{status}", response=self._response(frame, status, usage))])

    def encode(self, body: BaseModel) -> bytes:
        assert isinstance(body, Events)
        return b"".join(map(_encoded, body.events))

    def error(self, failure: ApiError, usage: Usage | None) -> bytes:
        """Returns OpenAI's two events of a failure: the error, and the response that failed."""
        events = [self._event("error", code=failure.code, message=failure.message, param=failure.param)]
        if self._frame is not None:
            code: Any = "rate_limit_exceeded" if failure.status == 429 else "server_error"
            failed = self._response(self._frame, "failed", usage)
            error = ResponseError(code=code, message=failure.message)
            events.append(self._event("response.failed", response=failed.model_copy(update={"error": error})))
        return b"".join(map(_encoded, events))

    def _grow(self, piece: Piece) -> str:
        """Adds a piece to the item, and returns what is new in its text or arguments."""
        if isinstance(self._item, OutputCall) or (self._item is None and self._begins_call(piece.text)):
            new = self._call.push(piece.text, complete=piece.ended == "stop")
            if new is None:
                return ""
            if self._item is None:
                self._item = OutputCall(
                    id=f"fc_{uuid4().hex}",
                    status="in_progress",
                    call_id=str(new.id),
                    name=_name(new.function),
                    arguments="",
                )
            assert isinstance(self._item, OutputCall)
            self._item = self._item.model_copy(update={"arguments": self._item.arguments + new.function.arguments})
            return new.function.arguments
        if self._item is None:
            self._item = OutputMessage(id=f"msg_{uuid4().hex}", status="in_progress", content=[OutputText(text="")])
        assert isinstance(self._item, OutputMessage)
        self._item = self._item.model_copy(update={"content": [OutputText(text=_text(self._item) + piece.text)]})
        return piece.text

    def _begins_call(self, text: str) -> bool:
        return bool(self._names) and (self._request.must_call or self._call.has_begun or begins_call(text))

    def _end(self, reason: ApiFinishReason | None, privmix: Privmix | None) -> None:
        self._reason = reason
        self._privmix = privmix or self._privmix
        status: ItemStatus = "completed" if reason == "stop" else "incomplete"
        self._item = self._item and self._item.model_copy(update={"status": status})

    def _beginning(self) -> Iterator[ResponseEvent]:
        match self._item:
            case OutputMessage() as message:
                yield self._event("response.output_item.added", output_index=0, item=_empty(message))
                yield self._part_event("response.content_part.added", message, part=OutputText(text=""))
            case OutputCall() as call:
                yield self._event("response.output_item.added", output_index=0, item=_empty(call))

    def _delta(self, item: OutputMessage | OutputCall, delta: str) -> ResponseEvent:
        if isinstance(item, OutputMessage):
            return self._part_event("response.output_text.delta", item, delta=delta, logprobs=[])
        return self._event("response.function_call_arguments.delta", output_index=0, item_id=item.id, delta=delta)

    def _ending(self) -> Iterator[ResponseEvent]:
        match self._item:
            case OutputMessage() as message:
                (part,) = message.content
                yield self._part_event("response.output_text.done", message, text=part.text, logprobs=[])
                yield self._part_event("response.content_part.done", message, part=part)
            case OutputCall() as call:
                yield self._event(
                    "response.function_call_arguments.done",
                    output_index=0,
                    item_id=call.id,
                    arguments=call.arguments,
                )
        if self._item is not None:
            yield self._event("response.output_item.done", output_index=0, item=self._item)

    def _part_event(self, kind: str, message: OutputMessage, **fields: Any) -> ResponseEvent:
        return self._event(kind, output_index=0, content_index=0, item_id=message.id, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=kind, sequence_number=self._events, **fields)
        self._events += 1
        return event

    def _response(self, frame: Frame, status: ResponseStatus, usage: Usage | None = None) -> Response:
        request = self._request
        choice = request.tool_choice
        text_format = request.text.format if request.text else None
        return Response(
            id=frame["id"],
            created_at=frame["created"],
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            model=frame["model"],
            output=[self._item] if self._item else [],
            temperature=request.temperature,
            text={
                "format": text_format.model_dump(by_alias=True, exclude_none=True) if text_format else {"type": "text"}
            },
            tool_choice=choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
            tools=[{**tool.model_dump(), "strict": True} for tool in request.tools],
            top_p=request.top_p,
            usage=usage and ResponseUsage.of(usage),
            privmix=self._privmix,
        )


def _response_status(reason: ApiFinishReason | None) -> ResponseStatus:
    return "completed" if reason == "stop" else "incomplete"


def _text(message: OutputMessage) -> str:
    return message.content[0].text


def _name(function: FunctionCall) -> str:
    return str(function.name)


def _empty(item: OutputMessage | OutputCall) -> OutputMessage | OutputCall:
    """Returns an item as its first event shows it."""
    return item.model_copy(update={"content": []} if isinstance(item, OutputMessage) else {"arguments": ""})


def _encoded(event: ResponseEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + event.model_dump_json().encode() + b"\n\n"
