"""Subjects: the names in the database of what tokens are charged to.

A key's tokens are charged to the key and to its group: `key:ID`, `group:NAME`. Tokens of an ensemble that has shares of
its own are charged to `ensemble:NAME:key:ID` and `ensemble:NAME:group:NAME` besides.
"""

from collections.abc import Sequence

from services.keys.records import Key

OF_ENSEMBLE = "ensemble:"


def subject_of(key: Key) -> str:
    return f"key:{key.id}"


def group_subject(group: str) -> str:
    return f"group:{group}"


def subjects_of(key: Key) -> tuple[str, ...]:
    """What a key's tokens are charged to: the key, and its group."""
    return (subject_of(key), group_subject(key.group)) if key.group else (subject_of(key),)


def within(ensemble: str, subject: str) -> str:
    """The subject of the same key or group, for the tokens of one ensemble alone."""
    return f"{OF_ENSEMBLE}{ensemble}:{subject}"


def charged(subjects: Sequence[str], ensemble: str | None) -> tuple[str, ...]:
    """All subjects that a request to an ensemble is charged to. None: an ensemble without shares of its own."""
    return tuple(subjects) if ensemble is None else (*subjects, *(within(ensemble, subject) for subject in subjects))


def split(subject: str) -> tuple[str | None, str]:
    """Split a subject into its ensemble, None if it counts all ensembles, and the subject of the key or group."""
    if not subject.startswith(OF_ENSEMBLE):
        return None, subject
    ensemble, _, rest = subject.removeprefix(OF_ENSEMBLE).partition(":")
    return ensemble, rest


def ensemble_of(subjects: Sequence[str]) -> str | None:
    """The ensemble of a request, from the subjects that it was charged to."""
    return split(subjects[-1])[0]
