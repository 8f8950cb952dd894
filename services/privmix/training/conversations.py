"""Reads conversations, lists of messages in OpenAI's fine-tuning form, for a chat template to render."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from privmix.foundation.json_lines import BadRow

Turn = Mapping[str, str]

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "ai", "bing", "bot", "chatgpt", "gpt", "model"), "assistant"),
}
"""The roles of templates by the names that tools write, in lower case."""
_TOOL_ROLES = frozenset({"tool", "tool_call", "tool_response", "function", "function_call", "observation", "ipython"})
_BESIDE = frozenset({"role", "content", "id", "type", "timestamp", "created_at", "createdAt"})
"""The keys of a message that no text is lost with."""
_NOTHING: tuple[object, ...] = (None, "", [], {})
_KEYS = tuple(re.compile(rf"""\\?["']({names})\\?["']\s*:""") for names in ("role|from", "content|value"))


@dataclass(frozen=True)
class Conversation:
    """Holds the messages of one conversation, for a chat template."""

    messages: tuple[Turn, ...]

    @property
    def text(self) -> str:
        """A transcript: one paragraph for each message."""
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


FIELDS_BESIDE = ("system", "system_prompt", "tools", "functions", "completion", "response")
"""The fields of a row that belong to its conversation in other tools' forms, and would be lost."""


def messages_of(text: str, field: str) -> Any:
    """Returns the messages that a text is as JSON, which cells of CSV hold them as; None for another text.

    Raises:
        BadRow: it holds messages in another notation, such as Python's.
    """
    if not (text.lstrip()[:1] in ("[", "{", '"') and all(key.search(text) for key in _KEYS)):
        return None
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        messages = None
    if not isinstance(messages, list):
        raise BadRow("holds messages, but no list of them as JSON", "write them so", field)
    return messages


def check_beside(row: Mapping[str, Any]) -> None:
    """Raises BadRow if a row has more of its conversation than the messages."""
    for field in FIELDS_BESIDE:
        if row.get(field) not in _NOTHING:
            raise BadRow("stands beside the messages and would be lost", "write it into them, or remove it", field)


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
    if "role" not in given:
        raise BadRow("has a message without a role", "write `role` and `content`, not `from` and `value`", field)
    name = str(given["role"]).lower()
    role = _ROLES.get(name)
    if role is None:
        kind = f"a tool ({name})" if name in _TOOL_ROLES else "an unknown role"
        raise BadRow(f"has a message of {kind}", "use system, user and assistant", field)
    if any(value not in _NOTHING for key, value in given.items() if key not in _BESIDE):
        raise BadRow("has a key beside role and content, which would be lost", "write it into the content", field)
    return {"role": role, "content": _content(given.get("content"), field)}


def _content(content: Any, field: str) -> str:
    """Returns the text of a message, whose parts are put together: a template must not see where they meet."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRow("has a content that is not text", "give text, or parts of the type text", field)
    for part in content:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if not isinstance(text, str) or "text" not in str(kind or "text"):
            raise BadRow("has a part that is not text", "remove images and other parts", field)
    return "".join(part["text"] for part in content)
