"""Reads the private corpus as a stream of documents, each with its user.

    for document in Corpus("train.jsonl"):
        document.user, document.text

Error messages name the file, the row and the field, but never quote the content, because it is private.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jinja2 import TemplateError

from privmix.foundation.errors import CorpusError, InputError
from privmix.foundation.identifiers import encodable, identifier
from privmix.foundation.json_lines import LINE_LIMIT, BadRow, too_long
from privmix.tokenization.people_text import PeopleText, TypedMarks
from privmix.training.conversations import FIELDS_BESIDE, Conversation, check_beside, conversation, messages_of
from privmix.training.rows import RowFields, rows
from privmix.training.sources import files

T = TypeVar("T")


class Document(NamedTuple):
    """Holds one text of one user; of a conversation, also its messages, and `text` is a transcript."""

    user: str
    text: str
    conversation: Conversation | None = None


class RefusedConversation(CorpusError):  # noqa: N818
    """The model's chat template refuses a conversation."""


class Corpus:
    """Iterates over the documents of files: JSON Lines, CSV or Parquet.

    `privmix.foundation.identifiers` reads the ids of users. A field that holds a list of messages is a conversation
    (`privmix.training.conversations`).

    Args:
        paths: files and globs; one of them or several.
        user_field: the field with the user's id.
        text_field: the field with the text or the conversation.
        skip_bad: skip bad rows and count them in `skipped`, instead of raising.
        users: None takes users from the field. ``row`` makes each row a user; rows with one text are one user.
            ``block:512`` makes each 512 tokens of the whole text a user.

    Attributes:
        block: the number of tokens of a user; None if users are not blocks. Documents then have one user.
        skipped: how many rows were skipped so far, by the kind of their problem. It depends on private text.
        people: the model that the text is for. With it, conversations that its template refuses are bad rows.

    Raises:
        CorpusError: a file does not exist; or, during iteration, a row is bad or a file is of another kind.
    """

    def __init__(
        self,
        paths: Path | str | Sequence[Path | str],
        user_field: str = "user",
        text_field: str = "text",
        skip_bad: bool = False,
        users: str | None = None,
    ) -> None:
        self._given = [str(path) for path in ([paths] if isinstance(paths, Path | str) else paths)]
        files(self._given)
        self.user_field = user_field
        self.text_field = text_field
        self.skip_bad = skip_bad
        self._by_row = users is not None
        self.block = None if users is None or users == "row" else _tokens_of(users)
        self.skipped: Counter[str] = Counter()
        self._read = 0
        self.people: PeopleText | None = None

    @property
    def name(self) -> str:
        """What was given, for messages."""
        return ", ".join(self._given)

    def __iter__(self) -> Iterator[Document]:
        self.skipped, self._read = Counter(), 0
        needed = (self.text_field,) if self._by_row else (self.user_field, self.text_field)
        for file in files(self._given):
            for place, row in rows(file, RowFields(needed, FIELDS_BESIDE)):
                try:
                    if isinstance(row, BadRow):
                        raise row
                    document = self._document(row)
                except BadRow as bad:
                    if not self.skip_bad:
                        raise _error(bad, f"{file}, {place}") from None
                    self.skipped[bad.kind] += 1
                else:
                    self._read += 1
                    yield document

    def read_into(self, take: Callable[[Iterable[Document]], T]) -> T:
        """Reads the documents once, as they stream by, and returns what `take` makes of them.

        Raises:
            CorpusError: there are no documents, or the corpus cannot be read.
        """
        content = take(self)
        if not self._read:
            raise self.empty()
        return content

    def empty(self, whose: str = "") -> CorpusError:
        """Returns the error for a corpus without documents, after reading it."""
        if not self.skipped:
            return CorpusError(f"corpus {self.name}: has no documents{whose}")
        return CorpusError(
            f"corpus {self.name}: has no documents{whose}: {self.skipped.total()} rows are bad and were skipped: "
            f"{kinds(self.skipped)}; name the fields that hold the user and the text (--user-field, "
            "--text-field), or mend the rows"
        )

    def _document(self, row: Mapping[str, Any]) -> Document:
        field = self.text_field
        text = row.get(field)
        if self.block is not None:
            user = "blocks"  # which `packing` cuts
        elif self._by_row:
            user = _digest(text)  # and not the row's number, which rows before it would change
        else:
            user = identifier(row.get(self.user_field), self.user_field)
        if isinstance(text, str) and (text := messages_of(value := text, field)) is None:
            return Document(user, _text(value, field))
        if text is None:
            raise BadRow("is missing", "add it, or name the field that holds the text", field)
        if not isinstance(text, list):
            raise BadRow("is not text", "make it a string, or a list of messages", field)
        check_beside(row)
        return self._conversation(user, conversation(text, field))

    def _conversation(self, user: str, told: Conversation) -> Document:
        field = self.text_field
        _text(json.dumps(told.messages, ensure_ascii=False), field)
        text = told.text
        if self.people is not None:
            try:
                rendered(told, self.people)
            except RefusedConversation:
                raise BadRow("is no sequence of roles that the chat template allows", "mend the roles", field) from None
        return Document(user, text, told)


def _tokens_of(users: str) -> int:
    """Returns the number of tokens of ``block:TOKENS``. Raises `InputError` if it is something else."""
    kind, _, size = users.partition(":")
    if kind != "block" or not size.isdecimal() or int(size) < 2:
        raise InputError(
            f"users: must be row or block:TOKENS, such as block:512, not {users!r}; --user-field names a field"
        )
    return int(size)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def rendered(told: Conversation, people: PeopleText) -> tuple[str, TypedMarks]:
    """Returns what `PeopleText.rendered` makes the tokens of a conversation of.

    Raises:
        InputError: the model has no chat template.
        RefusedConversation: the template refuses the conversation.
    """
    if not people.template:
        raise InputError(
            "text-field: holds conversations, and the public model has no chat template to render them; choose a model "
            "with one (an instruct model), or give the text itself"
        )
    try:
        return people.render(told.messages)
    except (TemplateError, TypeError, ValueError):  # expressions of a template fail on messages that they do not expect
        raise RefusedConversation(
            "text-field: a conversation is no sequence of roles that the model's chat template allows; remove it"
        ) from None


def kinds(skipped: Mapping[str, int]) -> str:
    """Returns the numbers of skipped rows by kind, the most frequent first. For the operator only: they are private."""
    ordered = sorted(skipped.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {kind}" for kind, count in ordered)


def _text(text: str, field: str) -> str:
    if len(text) > LINE_LIMIT:  # of a table; a line of JSON Lines has no more
        raise too_long(field)
    if not text or text.isspace():
        raise BadRow("is empty", "remove the row", field)
    return encodable(text, field)


def _error(bad: BadRow, place: str) -> CorpusError:
    field = f", field {bad.field!r}" if bad.field else ""
    return CorpusError(f"{place}{field}: {bad.problem}; {bad.fix}, or leave bad rows out (--skip-bad)")
