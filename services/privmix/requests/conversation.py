"""Writes chats as the messages that a model's chat template reads, with earlier calls of tools and their results."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from privmix.requests.schema import CalledFunction, EarlierCall, Message
from privmix.structure.grammar import call_prefix

TemplateMessage = dict[str, Any]

Render = Callable[[list[TemplateMessage]], str]
"""Renders messages with a chat template. Raises whatever the template meets."""


@dataclass(frozen=True)
class CallFormat:
    """How a chat template reads calls of tools.

    Attributes:
        parsed: it reads arguments as an object, otherwise as text.
        no_content: the content of a message that only calls.
    """

    parsed: bool
    no_content: str | None


class ChatWriter:
    """Writes messages for one chat template.

    A template that shows calls and results gets them in its own format, which is found by rendering an example. Other
    templates get a call as the text that answers of this service have, and a result as a message of the user.
    """

    def __init__(self, render: Render) -> None:
        # Some templates allow one call in a message and not two.
        self._formats = {count: _format(render, count) for count in (1, 2)}

    def messages(self, messages: Sequence[Message]) -> list[TemplateMessage]:
        """Returns the messages of a chat for the template."""
        most = max(len(message.tool_calls) for message in messages)
        if not most:
            return [_plain(message) for message in messages]
        call_format = self._formats[min(most, 2)]
        return _as_text(messages) if call_format is None else _in_format(messages, call_format)


def _plain(message: Message) -> TemplateMessage:
    # Templates use the role `system` for OpenAI's `developer`.
    return {"role": "system" if message.role == "developer" else message.role, "content": message.content}


def _in_format(messages: Sequence[Message], call_format: CallFormat) -> list[TemplateMessage]:
    calls: dict[str | None, TemplateMessage] = {}
    written: list[TemplateMessage] = []
    for message in messages:
        plain = _plain(message)
        if message.tool_calls:
            # A later message may use an id again.
            calls = {
                call.id: _call(call, len(written) + index, call_format) for index, call in enumerate(message.tool_calls)
            }
            plain |= {"content": message.content or call_format.no_content, "tool_calls": list(calls.values())}
        if message.role == "tool":
            call = calls[message.tool_call_id]
            plain |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
        written.append(plain)
    return written


def _call(call: EarlierCall, number: int, call_format: CallFormat) -> TemplateMessage:
    arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": json.loads(arguments) if call_format.parsed else arguments}
    # Some templates demand ids of nine characters. What a client's id says means nothing to a model.
    return {"id": f"{number:09d}", "type": "function", "function": function}


def _as_text(messages: Sequence[Message]) -> list[TemplateMessage]:
    names: dict[str | None, str] = {}
    written: list[TemplateMessage] = []
    for before, message in zip((None, *messages), messages, strict=False):
        plain = _plain(message)
        if message.tool_calls:
            names = {call.id: call.function.name for call in message.tool_calls}
            lines = [f"{call_prefix(call.function.name)}{call.function.arguments}}}" for call in message.tool_calls]
            plain["content"] = "\n".join([message.content, *lines] if message.content else lines)
        if message.role == "tool":
            plain = {"role": "user", "content": f"Result of {names[message.tool_call_id]}:\n{message.content}"}
            if before is not None and before.role == "tool":
                # Templates often demand that the roles alternate.
                plain["content"] = f"{written.pop()['content']}\n{plain['content']}"
        written.append(plain)
    return written


def _format(render: Render, count: int) -> CallFormat | None:
    """Returns the format in which a template shows `count` calls of one message, and their results."""
    names = [f"probe_{number}" for number in range(count)]
    for parsed, no_content in product((True, False), ("", None)):
        call_format = CallFormat(parsed, no_content)
        try:
            text = render(_in_format(_example(names), call_format))
        except Exception:  # a template raises whatever its expressions meet
            continue
        if all(f"{part}{name}" in text for name in names for part in ("", "value_of_", "result_of_")):
            return call_format
    return None


def _example(names: Sequence[str]) -> list[Message]:
    calls = [
        EarlierCall(id=name, function=CalledFunction(name=name, arguments=json.dumps({"key": f"value_of_{name}"})))
        for name in names
    ]
    results = [Message(role="tool", tool_call_id=name, content=f"result_of_{name}") for name in names]
    return [Message(role="user", content="Hello"), Message(role="assistant", tool_calls=calls), *results]
