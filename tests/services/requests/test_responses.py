"""Claim: a response is a chat in another form, and its events are those of the package `openai`, in its order."""

import json
from typing import Any
from uuid import uuid4

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from privmix.coordinator.messages import Delta, FinishReason, Generation
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.requests.answers import Answer
from privmix.requests.errors import ApiError, generation_failed
from privmix.requests.responses.answers import ResponsesStyle
from privmix.requests.responses.schema import ResponsesRequest
from privmix.requests.schema import ChatRequest

TOOL = {"type": "function", "name": "book", "parameters": {"type": "object"}, "strict": True, "description": None}
CALL = {"type": "function_call", "call_id": "a", "name": "book", "arguments": '{"a": 1}', "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "Booked."}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}],
}
TEXT = ("We op", "en", " at nine.")
CALLED = ('{"na', 'me": "book", "arguments": {"a": ', "1}", "}")


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parse(json.dumps({"model": "privmix", "input": "When?", **fields}).encode())


def test_items_are_the_messages_of_a_chat() -> None:
    two = [{"role": "user", "content": "Book it."}, SAID, CALL, {**CALL, "call_id": "b"}]
    items = [*two, {**RESULT, "call_id": "b"}, {**RESULT, "output": [{"type": "input_text", "text": "Done."}]}]
    call = {"id": "a", "function": {"name": "book", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Book it."},
        {"role": "assistant", "content": "Well.", "tool_calls": [call, {**call, "id": "b"}]},
        {"role": "tool", "tool_call_id": "b", "content": "Booked."},
        {"role": "tool", "tool_call_id": "a", "content": "Done."},
    ]
    same = ChatRequest.parse(json.dumps({"model": "privmix", "messages": chat}).encode())
    assert request(input=items, instructions="Be brief.").messages == same.messages
    assert request().messages == ChatRequest.model_validate(same.model_dump() | {"messages": [
        {"role": "user", "content": "When?"}]}).messages  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"store": True}, "store", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"input": []}, "input", "invalid_type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "unsupported_value"),
        ({"input": [{"type": [], "role": "user", "content": "a"}]}, "input", "unsupported_value"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "unsupported_value"),
        ({"input": [CALL]}, "input", "invalid_value"),
        ({"input": [RESULT]}, "input", "invalid_value"),
        ({"input": [{**CALL, "arguments": "{"}, RESULT]}, "input[0].arguments", "invalid_value"),
        ({"input": [{**CALL, "call_id": str(n)} for n in range(65)]}, "input", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [TOOL, TOOL]}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tools", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "end"}}, "tools", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "invalid_value"),
        ({"text": {"format": {"type": "text", "schema": {"a": 1}}}}, "text.format", "invalid_value"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "unsupported_parameter"),
        ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"temperature": 0}, "temperature", "unsupported_value"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as refusal:
        request(**fields)
    assert (refusal.value.param, refusal.value.code) == (param, code)


def answer_to(body: ResponsesRequest) -> tuple[Answer, str]:
    generation = Generation(uuid4().hex, (1,), SamplingOptions(), 9)
    return Answer(ResponsesStyle(body), "privmix", [generation], 3), generation.id


def streamed(body: ResponsesRequest, pieces: tuple[str, ...], reason: FinishReason) -> list[Any]:
    """Returns the events of a stream, checked against the types of the package `openai`."""
    answer, id_ = answer_to(body)
    written = answer.events(answer.opening())
    for number, piece in enumerate(pieces):
        delta = Delta(id_, piece, (1,), reason if number == len(pieces) - 1 else None)
        answer.add([delta])
        written += answer.events(answer.chunks([delta]))
    return checked(written + answer.events([answer.closing()], ended=True))


def checked(written: bytes) -> list[Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = []
    for number, block in enumerate(written.decode().strip().split("\n\n")):
        name, data = block.split("\n")
        event = adapter.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"
        assert event.sequence_number == number
        events.append(event)
    return events


OF_TEXT = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 3,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
OF_CALL = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    *["response.function_call_arguments.delta"] * 3,
    "response.function_call_arguments.done",
    "response.output_item.done",
]


@pytest.mark.parametrize(
    ("fields", "pieces", "types", "output"),
    [
        ({}, TEXT, OF_TEXT, "".join(TEXT)),
        ({"tools": [TOOL]}, TEXT, OF_TEXT, "".join(TEXT)),
        ({"tools": [TOOL], "tool_choice": "none"}, CALLED, None, "".join(CALLED)),
        ({"tools": [TOOL]}, CALLED, OF_CALL, '{"a": 1}'),
        ({"tools": [TOOL], "tool_choice": "required"}, CALLED, OF_CALL, '{"a": 1}'),
    ],
    ids=["text", "text with tools", "text like a call", "chosen call", "required call"],
)
def test_a_stream_has_openais_events_in_its_order(
    fields: dict[str, Any], pieces: tuple[str, ...], types: list[str] | None, output: str
) -> None:
    body = request(**fields)
    events = streamed(body, pieces, "stop")
    if types is not None:
        assert [event.type for event in events] == [*types, "response.completed"]
    # The package's own helper follows the events, with its assertions.
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(event)
    final = events[-1].response
    (item,) = final.output
    assert (item.content[0].text if item.type == "message" else item.arguments) == output
    assert "".join(event.delta for event in events if event.type.endswith(".delta")) == output
    assert (final.status, item.status, final.store) == ("completed", "completed", False)
    assert (final.usage.input_tokens, final.usage.output_tokens) == (3, len(pieces))

    answer, id_ = answer_to(body)
    answer.add([Delta(id_, "".join(pieces), (1,) * len(pieces), "stop")])
    whole = Response.model_validate_json(answer.complete().model_dump_json(), strict=True)
    names = {"id", "call_id", "created_at", "completed_at"}
    assert whole.model_dump(exclude=names | {"output"}) == final.model_dump(exclude=names | {"output"})
    assert whole.output[0].model_dump(exclude=names) == item.model_dump(exclude=names)


@pytest.mark.parametrize("reason", ["length", "share", "privacy_budget"])
def test_an_answer_that_a_limit_ends_is_incomplete(reason: FinishReason) -> None:
    tools = {"tools": [TOOL]}
    for pieces, fields, items in ((TEXT, {}, 1), (CALLED[:3], tools, 1), (CALLED[:1], tools, 0), (("",), {}, 1)):
        last = streamed(request(**fields), pieces, reason)[-1]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"
        assert [item.status for item in last.response.output] == ["incomplete"] * items


def test_a_failure_is_an_error_and_a_failed_response() -> None:
    answer, id_ = answer_to(request())
    delta = Delta(id_, "We ", (1,))
    answer.add([delta])
    written = answer.events([*answer.opening(), *answer.chunks([delta])])
    *_, error, failed = checked(written + answer.error_event(generation_failed(None)))
    assert (error.type, error.code) == ("error", "generation_failed")
    assert (failed.type, failed.response.status, failed.response.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )
    assert failed.response.usage.output_tokens == 1
