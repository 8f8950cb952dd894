"""Reads labelled texts: JSON Lines files, and the jobs of `privmix generate` with what their cards state."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import read_lines
from privmix.generation.card import JSON_FILE as CARD
from privmix.generation.card import load_card
from privmix.generation.job import OUTPUT, load_job, load_output
from privmix.generation.records import records_of
from privmix.generation.template import LABEL

USER = "user"


@dataclass(frozen=True)
class TextOrigin:
    """States where texts come from, as the card of their job does; a plain file states nothing.

    Attributes:
        protocol: the kind of the service's privacy event.
        epsilon, delta: the service's guarantee for all that it releases.
        tokens, charged: the number of delivered tokens, and how many of them were not free.
    """

    protocol: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    tokens: int | None = None
    charged: int | None = None


@dataclass(frozen=True)
class Labelled:
    """Holds texts with their labels.

    Attributes:
        users: who wrote each text: a user's id, or the number of the line.
        dropped: the number of lines without a usable text: blank ones, and records that the token limit cut.
    """

    name: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    users: tuple[str, ...]
    dropped: int = 0
    origin: TextOrigin = TextOrigin()

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def classes(self) -> frozenset[str]:
        return frozenset(self.labels)

    def only(self, classes: frozenset[str]) -> "Labelled":
        """Returns the texts whose labels are among these classes."""
        return self._kept([index for index, label in enumerate(self.labels) if label in classes])

    def sample(self, count: int) -> "Labelled":
        """Returns at most so many texts in their order, the same ones every time."""
        if len(self) <= count:
            return self
        return self._kept(sorted(np.random.default_rng(0).permutation(len(self))[:count].tolist()))

    def _kept(self, kept: Sequence[int]) -> "Labelled":
        texts, labels, users = (
            tuple(values[index] for index in kept) for values in (self.texts, self.labels, self.users)
        )
        return Labelled(self.name, texts, labels, users, self.dropped, self.origin)


def parse_named(words: Sequence[str]) -> dict[str, Path]:
    """Parses `NAME=PATH` into paths by name.

    Raises:
        InputError: a word has another form, or a name is given twice.
    """
    named: dict[str, Path] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (equals and name.strip() and path):
            raise InputError(f"train: {word!r} must be NAME=PATH, such as exponential=texts/exponential")
        if name.strip() in named:
            raise InputError(f"train: the name {name.strip()!r} is given twice")
        named[name.strip()] = Path(path)
    return named


def read(name: str, path: Path, text_field: str, label_field: str) -> Labelled:
    """Reads a JSON Lines file, or a job of `privmix generate` (its directory or its output file).

    In a job with a schema, both fields are those of the records; otherwise the text is the job's, and the label is a
    field of its template. `--label` calls that field `label`, which is also accepted.

    Raises:
        InputError: the file or a line is invalid, or there is no text. The message names the line and the field, and
            never quotes the content.
    """
    job = path if path.is_dir() else path.parent if path.name == OUTPUT and (path.parent / CARD).exists() else None
    if job is None:
        rows = read_lines(path, "an object with a text and a label")
        return _labelled(name, path, rows, text_field, label_field)
    lines = load_output(job)
    origin = _origin(job)
    if load_job(job).get("schema") is not None:
        records = records_of(lines)
        return _labelled(name, job, enumerate(records, 1), text_field, label_field, origin, len(lines) - len(records))
    label = label_field if not lines or label_field in lines[0] else LABEL
    return _labelled(name, job, enumerate(lines, 1), "text", label, origin)


def _labelled(
    name: str,
    path: Path,
    rows: Iterator[tuple[int, Mapping[str, Any]]] | enumerate[Mapping[str, Any]],
    text_field: str,
    label_field: str,
    origin: TextOrigin | None = None,
    dropped: int = 0,
) -> Labelled:
    found: list[tuple[str, str, str]] = []
    for number, row in rows:
        for field in (text_field, label_field):
            if row.get(field) is None:
                raise InputError(f"{path}: line {number}: has no field {field!r}; add it, or name the right field")
        text, label = row[text_field], row[label_field]
        if not isinstance(text, str):
            raise InputError(f"{path}: line {number}: {text_field}: must be text")
        if not isinstance(label, str | int | bool):
            raise InputError(f"{path}: line {number}: {label_field}: must be text, a whole number, true or false")
        if text.strip():
            found.append((text, str(label), str(row.get(USER, number))))
        else:
            dropped += 1
    if not found:
        raise InputError(f"{path}: has no labelled text")
    texts, labels, users = (tuple(column) for column in zip(*found, strict=True))
    return Labelled(name, texts, labels, users, dropped, origin or TextOrigin())


def _origin(job: Path) -> TextOrigin:
    """Reads the card of a job.

    Raises:
        InputError: the job has none.
    """
    card = load_card(job)
    budget = card["budget"]
    return TextOrigin(
        (card["protocol"] or {}).get("kind"),
        card["epsilon"],
        card["delta"],
        budget["tokens_delivered"],
        budget["tokens_delivered"] - budget.get("tokens_free", 0),
    )
