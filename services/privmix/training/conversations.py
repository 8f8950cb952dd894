"""Reads conversations and instructions of the usual forms as the messages that a chat template renders.

The forms are OpenAI's fine-tuning form (`messages` with roles), ShareGPT's (`conversations` with `from` and `value`),
and fields of instructions, such as `prompt` and `completion`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from privmix.foundation.json_lines import BadRow

Turn = Mapping[str, Any]

_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
"""The roles of templates by the names of OpenAI's and ShareGPT's forms."""


@dataclass(frozen=True)
class Conversation:
    """Holds the messages of one conversation, and the tools that it declares, for a chat template."""

    messages: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """A transcript: one paragraph for each message."""
        return "\n".join(f"{message['role']}: {_said(message)}" for message in self.messages)

    def first(self, characters: int) -> "Conversation | None":
        """Returns the first messages, which have at most so many characters together; None for none."""
        kept, left = [], characters
        for message in self.messages:
            left -= len(_said(message))
            if left < 0:
                break
            kept.append(message)
        return Conversation(tuple(kept), self.tools) if kept else None

    def for_template(self, template: str) -> tuple[list[Turn], list[Mapping[str, Any]] | None]:
        """Returns the messages and the tools for a chat template.

        One that does not know calls of tools gets them as text, and tools only if it shows them.
        """
        known = "tool_calls" in template
        messages = list(self.messages if known else _without_calls(self.messages))
        return messages, list(self.tools) if self.tools and "tools" in template else None

    def row(self) -> dict[str, Any]:
        """Returns the fields of a row of JSON Lines from which `conversation` reads the same."""
        return {"text": list(self.messages), **({"tools": list(self.tools)} if self.tools else {})}


def conversation(value: Sequence[Any], tools: Any, field: str) -> Conversation:
    """Returns the conversation in a field of a row.

    Args:
        value: the messages.
        tools: the row's declared tools, as a list or as JSON; None for none.

    Raises:
        BadRow: a message has another form, or no message has text.
    """
    messages = tuple(_message(message, field) for message in value)
    if not any(_said(message).strip() for message in messages):
        raise BadRow("is empty", "remove the row", field)
    return Conversation(messages, _tools(tools))


def instruction(values: Sequence[Any], fields: Sequence[str]) -> Conversation:
    """Returns the conversation of one turn: the last field is the answer to the others.

    Raises:
        BadRow: the first or the last field has no text.
    """
    for field, value in zip(fields, values, strict=True):
        if value is not None and not isinstance(value, str):
            raise BadRow("is not text", "make it a string", field)
        if field in (fields[0], fields[-1]) and not (value or "").strip():
            raise BadRow("is empty", "remove the row", field)
    asked = "\n\n".join(value for value in values[:-1] if value)
    return Conversation(({"role": "user", "content": asked}, {"role": "assistant", "content": values[-1]}))


def _message(given: Any, field: str) -> Turn:
    if not isinstance(given, Mapping):
        raise BadRow("has a message that is no object", "give each one a role and a content", field)
    role = _SPEAKERS.get(str(given.get("role") or given.get("from")))
    if role is None:
        raise BadRow("has a message of an unknown role", "use system, user, assistant and tool", field)
    content = given.get("content")
    content = given.get("value") if content is None else content
    message: dict[str, Any] = {"role": role, "content": _content(content, field)}
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [_call(call, field) for call in calls]
    elif given.get("function_call"):
        message["tool_calls"] = [_call({"function": given["function_call"]}, field)]
    for name in ("tool_call_id", "name"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    return message


def _content(content: Any, field: str) -> str:
    """Returns the text of a message, whose parts are put together: a template must not see where they meet."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRow("has a content that is not text", "give text, or parts of the type text", field)
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise BadRow("has a part that is not text", "remove images and other parts", field)
    return "".join(part["text"] for part in content)


def _call(call: Any, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow("has a tool call without a function's name", "give it OpenAI's form", field)
    arguments = _object(function.get("arguments"))
    id_ = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**id_, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _object(arguments: Any) -> Any:
    """Returns arguments, which OpenAI's form has as JSON, as the object that templates take."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(tools, str):
        tools = _object(f'{{"tools": {tools}}}')
        tools = tools.get("tools") if isinstance(tools, Mapping) else None
    return tuple(tool for tool in tools if isinstance(tool, Mapping)) if isinstance(tools, Sequence) else ()


def _said(message: Turn) -> str:
    """Returns the content of a message with its calls of tools as JSON, one on each line."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join([*([message["content"]] if message["content"] else []), *calls])


def _without_calls(messages: Iterable[Turn]) -> Iterator[Turn]:
    """Yields the messages for a template that does not know calls of tools, as text."""
    names: dict[Any, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"]["name"]
        if message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id")) or "the function"
            yield {"role": "user", "content": f"Result of {name}:\n{message['content']}"}
        else:
            yield {"role": message["role"], "content": _said(message)}
