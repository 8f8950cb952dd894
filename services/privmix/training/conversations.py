"""Reads conversations, lists of messages in OpenAI's fine-tuning form, for a chat template to render."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from privmix.foundation.json_lines import BadRow

Turn = Mapping[str, str]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The roles of templates by OpenAI's names."""


@dataclass(frozen=True)
class Conversation:
    """Holds the messages of one conversation, for a chat template."""

    messages: tuple[Turn, ...]

    @property
    def text(self) -> str:
        """A transcript: one paragraph for each message."""
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


def conversation(value: Sequence[Any], field: str) -> Conversation:
    """Returns the conversation in a field of a row.

    Raises:
        BadRow: a message has another form, or no message has text.
    """
    messages = tuple(_message(message, field) for message in value)
    if not any(message["content"].strip() for message in messages):
        raise BadRow("is empty", "remove the row", field)
    return Conversation(messages)


def _message(given: Any, field: str) -> Turn:
    if not isinstance(given, Mapping):
        raise BadRow("has a message that is no object", "give each one a role and a content", field)
    role = _ROLES.get(str(given.get("role")))
    if role is None:
        raise BadRow("has a message of an unknown role", "use system, user and assistant", field)
    if given.get("tool_calls") or given.get("function_call"):
        raise BadRow("has a call of a tool", "write the call as text", field)
    return {"role": role, "content": _content(given.get("content"), field)}


def _content(content: Any, field: str) -> str:
    """Returns the text of a message, whose parts are put together: a template must not see where they meet."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRow("has a content that is not text", "give text, or parts of the type text", field)
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise BadRow("has a part that is not text", "remove images and other parts", field)
    return "".join(part["text"] for part in content)
