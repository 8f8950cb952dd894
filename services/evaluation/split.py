"""A corpus split in two by user: text to train on, and text of other users to evaluate on.

Split by line, a speaker would stand on both sides, and what a model has learnt of a person would count as what it has
learnt of the language.
"""

import hmac
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from services.errors import InputError
from services.files import write_lines
from services.training.corpus import Corpus
from services.training.partition import read_salt

_BITS = 64


@dataclass(frozen=True)
class Split:
    """How many documents and users went to each side."""

    train_documents: int
    train_users: int
    held_out_documents: int
    held_out_users: int


def held_out(user: str, salt: bytes, share: float) -> bool:
    """Whether a user's text is held out, with probability `share`: a keyed hash of the user's id, and nothing else.

    Under a prefix of its own, so that with one salt for both it tells nothing about the user's part.
    """
    digest = hmac.digest(salt, b"privmix held out\0" + user.encode(), "sha256")
    number = int.from_bytes(digest[: _BITS // 8], "big")
    return number < int(share * 2**_BITS)


def split(
    corpus: Corpus, train: Path, held_out_file: Path, *, share: float, salt_file: Path, user_limit: int | None = None
) -> Split:
    """Write the two sides of a corpus as JSON Lines with the fields `user` and `text`; each appears whole.

    Args:
        share: the expected share of users that are held out, in (0, 1). How much of the text that is depends on them.
        salt_file: the secret of the split, drawn on first use; with the same one a user stays on the same side.
        user_limit: characters of each training user's text that are kept, the first; None keeps all. It depends on
            nobody else's text, so parts stay separate; it bounds what one user contributes, and the time to train.

    Raises:
        InputError: the share or the limit is out of range, a side is empty, or a file cannot be written.
    """
    if not 0 < share < 1:
        raise InputError(f"held-out: must lie between 0 and 1, not {share:g}")
    if user_limit is not None and user_limit < 1:
        raise InputError(f"user-limit: must be at least 1, not {user_limit}")
    _make_room(train, held_out_file, salt_file)
    salt = read_salt(salt_file)
    sides: dict[bool, list[dict[str, str]]] = {False: [], True: []}
    characters: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for document in corpus:
        side = held_out(document.user, salt, share)
        kept = document.text
        if user_limit is not None and not side:
            kept = kept[: user_limit - characters[side][document.user]]
        if kept.strip():
            characters[side][document.user] += len(kept)
            sides[side].append({"user": document.user, "text": kept})
    for side, what in ((True, "held-out"), (False, "training")):
        if not sides[side]:
            raise InputError(
                f"held-out: {share:g} leaves no user on the {what} side of {corpus.path}; "
                f"choose another share, or remove {salt_file} to draw again"
            )
    for side, path in ((False, train), (True, held_out_file)):
        write_lines(path, sides[side])
    return Split(len(sides[False]), len(characters[False]), len(sides[True]), len(characters[True]))


def _make_room(*paths: Path) -> None:
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error
