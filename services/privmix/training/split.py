"""Splits a corpus by user into text for training and text of other users for evaluation.

If it split by line, a user could be on both sides, and an evaluation would reward a model for memorising that user.
"""

import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from privmix.foundation.errors import InputError
from privmix.foundation.files import replacing
from privmix.foundation.json_lines import line_of
from privmix.training.corpus import Corpus, Document
from privmix.training.partition import read_salt

_BITS = 64


@dataclass(frozen=True)
class SplitCounts:
    """Counts the documents and users on each side."""

    train_documents: int
    train_users: int
    held_out_documents: int
    held_out_users: int


def held_out(user: str, salt: bytes, fraction: float) -> bool:
    """Returns whether a user's text is held out, with probability `fraction`. A keyed hash of the id decides alone.

    The hash has a separate prefix, so that it reveals nothing about the user's part, even with the same salt.
    """
    digest = hmac.digest(salt, b"privmix held out\0" + user.encode(), "sha256")
    number = int.from_bytes(digest[: _BITS // 8], "big")
    return number < int(fraction * 2**_BITS)


def split(corpus: Corpus, train: Path, held_out_file: Path, *, fraction: float, salt_file: Path) -> SplitCounts:
    """Writes the two sides of a corpus as JSON Lines with the fields `user` and `text`, each atomically.

    Only their owner can read the files.

    The text of a conversation is its list of messages.

    Args:
        fraction: of the users, expected to be held out, in (0, 1). That of the text may differ.
        salt_file: the secret of the split, drawn on first use. With the same secret, a user stays on the same side.

    Raises:
        InputError: the fraction is out of range, a side is empty, a file cannot be written, or the corpus
            is invalid (`CorpusError`).
    """
    if not 0 < fraction < 1:
        raise InputError(f"held-out: must lie between 0 and 1, not {fraction:g}")
    _create_parents(train, held_out_file, salt_file)
    salt = read_salt(salt_file)
    train_side, held_out_side = _Side(), _Side()
    with replacing(train, private=True) as train_lines, replacing(held_out_file, private=True) as held_out_lines:
        for document in corpus:
            if held_out(document.user, salt, fraction):
                held_out_side.write(document, held_out_lines)
            else:
                train_side.write(document, train_lines)
        if not train_side.documents + held_out_side.documents:
            raise corpus.empty()
        for side, label in ((held_out_side, "held-out"), (train_side, "training")):
            if not side.documents:
                raise InputError(
                    f"held-out: {fraction:g} leaves no user on the {label} side of {corpus.name}; "
                    f"choose another fraction, or remove {salt_file} to draw a new one"
                )
    return SplitCounts(train_side.documents, len(train_side.users), held_out_side.documents, len(held_out_side.users))


class _Side:
    """Counts the documents and the users that are written to one side."""

    def __init__(self) -> None:
        self.documents = 0
        self.users = set[str]()

    def write(self, document: Document, file: BinaryIO) -> None:
        told = document.conversation
        self.documents += 1
        self.users.add(document.user)
        file.write(line_of({"user": document.user, "text": document.text if told is None else told.messages}))


def _create_parents(*paths: Path) -> None:
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error
