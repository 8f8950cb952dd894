"""Holds users out of a corpus of public text."""

from pathlib import Path

from services.training.corpus import Corpus
from services.training.split import split

HELD_OUT = 0.1
"""The share of the users that is held out."""


def held_apart(corpus: Path, folder: Path, user_limit: int | None = None) -> tuple[Corpus, Corpus]:
    """Returns the text to train on and that of held-out users, which are the same ones every time: the text is public.

    Args:
        folder: where both are written.
        user_limit: the number of characters to keep of each user to train on.

    Raises:
        InputError: as `split`.
    """
    train, held_out, salt = (folder / name for name in ("train.jsonl", "heldout.jsonl", "split.salt"))
    folder.mkdir(parents=True, exist_ok=True)
    salt.write_bytes(bytes(32))
    split(Corpus(corpus), train, held_out, share=HELD_OUT, salt_file=salt, user_limit=user_limit)
    return Corpus(train), Corpus(held_out)
