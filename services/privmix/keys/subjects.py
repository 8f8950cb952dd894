"""Builds subjects: the names of shares in the database.

A request is charged to the subjects of its key and its group: `key:ID`, `group:NAME`.
"""

from privmix.keys.records import Key


def key_subject(key: Key) -> str:
    return f"key:{key.id}"


def group_subject(group: str) -> str:
    return f"group:{group}"


def subjects_of(key: Key) -> tuple[str, ...]:
    """Returns the subjects of a key: its own and its group's."""
    return (key_subject(key), group_subject(key.group)) if key.group else (key_subject(key),)
