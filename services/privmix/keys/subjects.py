"""Builds and parses subjects: the names of shares in the database.

A request is charged to the subjects of its key and its group: `key:ID`, `group:NAME`. If its ensemble has shares of its
own, it is charged to `ensemble:NAME:key:ID` and `ensemble:NAME:group:NAME` too.
"""

from collections.abc import Sequence

from privmix.keys.records import Key

OF_ENSEMBLE = "ensemble:"


def key_subject(key: Key) -> str:
    return f"key:{key.id}"


def group_subject(group: str) -> str:
    return f"group:{group}"


def subjects_of(key: Key) -> tuple[str, ...]:
    """Returns the subjects of a key: its own and its group's."""
    return (key_subject(key), group_subject(key.group)) if key.group else (key_subject(key),)


def ensemble_subject(ensemble: str, subject: str) -> str:
    """Returns the subject of the same key or group for one ensemble alone."""
    return f"{OF_ENSEMBLE}{ensemble}:{subject}"


def charged_subjects(subjects: Sequence[str], ensemble: str | None) -> tuple[str, ...]:
    """Returns all subjects to which a request is charged. `ensemble` is None if it has no shares of its own."""
    return (
        tuple(subjects)
        if ensemble is None
        else (*subjects, *(ensemble_subject(ensemble, subject) for subject in subjects))
    )


def split(subject: str) -> tuple[str | None, str]:
    """Splits a subject into its ensemble (None if it counts all ensembles) and the subject of the key or group."""
    if not subject.startswith(OF_ENSEMBLE):
        return None, subject
    ensemble, _, rest = subject.removeprefix(OF_ENSEMBLE).partition(":")
    return ensemble, rest


def ensemble_of(subjects: Sequence[str]) -> str | None:
    """Returns the ensemble of a request from the subjects to which it was charged."""
    return split(subjects[-1])[0]
