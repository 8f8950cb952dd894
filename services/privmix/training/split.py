"""Splits a corpus by user into text for training and text of other users for evaluation.

If it split by line, a user could be on both sides, and an evaluation would reward a model for memorising that user.
"""

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from privmix.foundation.errors import InputError
from privmix.foundation.files import replacing
from privmix.foundation.json_lines import line_of
from privmix.training.corpus import Corpus
from privmix.training.partition import read_salt

_BITS = 64


@dataclass
class Side:
    """Counts what one side of a split got."""

    documents: int = 0
    users: set[str] = field(default_factory=set)


def held_out(user: str, salt: bytes, fraction: float) -> bool:
    """Returns whether a user's text is held out, with probability `fraction`. A keyed hash of the id decides alone.

    The hash has a separate prefix, so that it reveals nothing about the user's part, even with the same salt.
    """
    digest = hmac.digest(salt, b"privmix held out\0" + user.encode(), "sha256")
    number = int.from_bytes(digest[: _BITS // 8], "big")
    return number < int(fraction * 2**_BITS)


def split(corpus: Corpus, train: Path, held_out_file: Path, *, fraction: float, salt_file: Path) -> tuple[Side, Side]:
    """Writes the two sides of a corpus as JSON Lines with the fields `user` and `text`, each atomically.

    Only their owner can read the files. The text of a conversation is its list of messages.

    Args:
        fraction: of the users, expected to be held out, in (0, 1). That of the text may differ.
        salt_file: the secret of the split, drawn on first use. With the same secret, a user stays on the same side.

    Returns:
        The sides of training and of held-out text.

    Raises:
        InputError: the fraction is out of range, a side is empty, or the corpus is invalid (`CorpusError`).
    """
    if not 0 < fraction < 1:
        raise InputError(f"held-out: must lie between 0 and 1, not {fraction:g}")
    for path in (train, held_out_file, salt_file):
        path.parent.mkdir(parents=True, exist_ok=True)
    salt, sides = read_salt(salt_file), (Side(), Side())
    with replacing(train, private=True) as train_lines, replacing(held_out_file, private=True) as held_out_lines:
        for document in corpus:
            is_held_out, told = held_out(document.user, salt, fraction), document.conversation
            text = document.text if told is None else told.messages
            (train_lines, held_out_lines)[is_held_out].write(line_of({"user": document.user, "text": text}))
            sides[is_held_out].documents += 1
            sides[is_held_out].users.add(document.user)
        if not any(side.documents for side in sides):
            raise corpus.empty()
        for side, label in zip(sides, ("training", "held-out"), strict=True):
            if not side.documents:
                raise InputError(
                    f"held-out: {fraction:g} leaves no user on the {label} side of {corpus.name}; "
                    f"choose another fraction, or remove {salt_file} to draw a new one"
                )
    return sides
