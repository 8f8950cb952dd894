"""Defines the body of `POST /v1/responses`.

Source: the OpenAI API reference (responses), and the types of the package `openai`.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from privmix.requests.schema import (
    MAX_CALL_ID,
    MAX_TOOLS,
    NEVER_LEAVE,
    NOTHING_STORED,
    OWN_TEMPLATE,
    TOOL_NAME,
    Body,
    CallArguments,
    CalledFunction,
    Content,
    EarlierCall,
    Function,
    GenerationRequest,
    IgnoredFlag,
    IgnoredText,
    Items,
    Message,
    Neutral,
    check_calls,
    check_tools,
    refused,
)

EARLIER = "responses are not stored; send their items again in input, and remove it"
NO_REASONING = "separate reasoning is not supported; remove it"
ONE_ANSWER = "a response has one answer; remove it"

InputStatus = Annotated[
    Any, Neutral("give completed, incomplete or in_progress, or remove it", "completed", "incomplete", "in_progress")
]


class MessageItem(Body):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: IgnoredText = None
    status: InputStatus = None
    phase: IgnoredText = None


class CallItem(Body):
    """A call of a function in an earlier response."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=MAX_CALL_ID)
    name: str = Field(pattern=TOOL_NAME)
    arguments: CallArguments
    id: IgnoredText = None
    status: InputStatus = None


class ResultItem(Body):
    """The result of a call, which the client computed."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=MAX_CALL_ID)
    output: Content
    id: IgnoredText = None
    status: InputStatus = None
    name: IgnoredText = None


_ITEMS = ("message", "function_call", "function_call_output")


def _tag(item: Any) -> str:
    """Returns the tag of an item. Parentheses keep it out of the path of an error, which names fields alone."""
    kind = item.get("type") or "message" if isinstance(item, dict) else item.type
    return f"({kind})"


InputItem = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[CallItem, Tag("(function_call)")]
    | Annotated[ResultItem, Tag("(function_call_output)")],
    Discriminator(_tag),
]


def _items(value: object) -> object:
    """Returns a list of items for a text, which is a message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise refused("invalid_type", "give a text or a list of items")
    if not all(isinstance(item, dict) for item in value):
        raise refused("invalid_type", "an item is an object")
    for index, item in enumerate(value):
        if item.get("type") is not None and item["type"] not in _ITEMS:
            kinds = ", ".join(_ITEMS)
            raise refused("unsupported_value", f"item {index} has another type than {kinds}; {NOTHING_STORED}")
    return value


def _messages(items: Sequence[MessageItem | CallItem | ResultItem]) -> list[Message]:
    """Returns the messages of a chat. Calls that follow each other, or a text of the assistant, are one message."""
    messages: list[Message] = []
    for item in items:
        match item:
            case MessageItem():
                messages.append(Message(role=item.role, content=item.content))
            case ResultItem():
                messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
            case CallItem():
                before = messages.pop() if messages and messages[-1].role == "assistant" else None
                function = CalledFunction(name=item.name, arguments=item.arguments)
                calls = [*(before.tool_calls if before else ()), EarlierCall(id=item.call_id, function=function)]
                if len(calls) > MAX_TOOLS:
                    raise refused("invalid_value", f"give at most {MAX_TOOLS} calls without results between them")
                content = before.content if before else None
                messages.append(Message(role="assistant", content=content, tool_calls=calls))
    return messages


def _check_items(items: list[Any]) -> list[Any]:
    check_calls(_messages(items))
    return items


InputItems = Annotated[
    Items[InputItem],
    BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
    AfterValidator(_check_items),
]


class FunctionTool(Function):
    """A function that the response can call."""

    type: Literal["function"]


class NamedFunction(Body):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of the text. A name and a description are accepted; every schema is followed strictly."""

    type: Literal["text", "json_object", "json_schema"]
    name: IgnoredText = None
    description: IgnoredText = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: IgnoredFlag = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise refused("invalid_value", "give a schema with the type json_schema, and only with it")
        return self


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Any, Neutral("max_output_tokens sets the length of answers; remove it", "medium")] = None


class ResponseStreamOptions(Body):
    include_obfuscation: Annotated[Any, Neutral("events are not padded; use false", False)] = None


class ResponsesRequest(GenerationRequest):
    """The body of `POST /v1/responses`. `top_k`, `stop`, `ignore_eos` and `structured_outputs` are extensions."""

    prompt_field = "input"

    input: InputItems
    instructions: str | None = Field(None, description="The system message, before all others.")
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = Field(
        None, description="With `auto`, the default, the first token decides between a text and one call."
    )
    tools: Items[FunctionTool] = Field([], max_length=MAX_TOOLS, validate_default=True)
    store: Annotated[Any, Neutral(NOTHING_STORED, False)] = None

    n: Annotated[Any, Neutral(ONE_ANSWER, 1)] = 1
    max_tokens: Annotated[Any, Neutral("use max_output_tokens")] = None
    response_format: Annotated[Any, Neutral("use text.format")] = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]

    background: Annotated[Any, Neutral(NOTHING_STORED, False)] = None
    conversation: Annotated[Any, Neutral(EARLIER)] = None
    include: Annotated[
        Any, Neutral("a response has nothing more to include; remove it", [], ["reasoning.encrypted_content"])
    ] = None
    max_tool_calls: int | None = Field(None, ge=1, description="Accepted, but not used: there are no built-in tools.")
    metadata: Annotated[Any, Neutral(NOTHING_STORED, {})] = None
    parallel_tool_calls: IgnoredFlag = None
    previous_response_id: Annotated[Any, Neutral(EARLIER)] = None
    prompt: Annotated[Any, Neutral(OWN_TEMPLATE)] = None
    prompt_cache_key: IgnoredText = None
    prompt_cache_options: Annotated[Any, Neutral(NOTHING_STORED, {})] = None
    prompt_cache_retention: Annotated[Any, Neutral(NOTHING_STORED)] = None
    reasoning: Annotated[
        Any, Neutral(NO_REASONING, {}, {"effort": None}, {"effort": "none"}, {"effort": None, "summary": None})
    ] = None
    safety_identifier: IgnoredText = None
    service_tier: Annotated[Any, Neutral("there is only one service tier; remove it", "auto", "default")] = None
    top_logprobs: Annotated[Any, Neutral(NEVER_LEAVE, 0)] = None
    truncation: Annotated[Any, Neutral("input is not truncated; use disabled", "disabled")] = None

    @field_validator("tools")
    @classmethod
    def _tools_can_be_called(cls, tools: list[FunctionTool], info: ValidationInfo) -> list[FunctionTool]:
        choice = info.data.get("tool_choice")
        name = choice.name if isinstance(choice, NamedFunction) else None
        check_tools([tool.name for tool in tools], name, choice == "required")
        return tools

    @cached_property
    def messages(self) -> list[Message]:
        """The chat that this request is."""
        instructions = [Message(role="system", content=self.instructions)] if self.instructions else []
        return [*instructions, *_messages(self.input)]

    @property
    def callable_tools(self) -> Sequence[Function]:
        if isinstance(self.tool_choice, NamedFunction):
            return [tool for tool in self.tools if tool.name == self.tool_choice.name]
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "auto")

    @property
    def json_answer(self) -> tuple[str, dict[str, Any] | bool] | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.schema_ is None:
            return "text.format", {"type": "object"}
        return "text.format.schema", wanted.schema_

    @property
    def token_limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage: its last event has the whole response."""
        return True

    @property
    def continuous_usage(self) -> bool:
        return False
