"""Names corpora of public text, and holds users out of them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from privmix.foundation.json_lines import write_lines
from privmix.training.corpus import Corpus
from privmix.training.demo import TRAIN, write_demo_corpus
from privmix.training.split import split

HELD_OUT = 0.1
"""The fraction of the users that is held out."""


def corpora_by_name(files: Sequence[Path], output: Path, demo_users: int | None) -> dict[str, Path]:
    """Returns corpora by the names of their files; with `demo_users`, also a demo corpus of so many, written here."""
    corpora = {path.stem: path for path in files}
    if demo_users is not None:
        write_demo_corpus(output / "demo-corpus", users=demo_users)
        corpora["demo"] = output / "demo-corpus" / TRAIN
    return corpora


def held_apart(corpus: Corpus, folder: Path, user_limit: int | None = None) -> tuple[Corpus, Corpus]:
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
    split(
        corpus,
        train,
        held_out,
        fraction=HELD_OUT,
        salt_file=salt,
    )
    if user_limit is not None:
        left: Counter[str] = Counter()
        rows = [document.row() for document in Corpus(train)]
        for row in rows:
            row["text"] = row["text"][: user_limit - left[row["user"]]]
            left[row["user"]] += len(row["text"])
        write_lines(train, (row for row in rows if row["text"].strip()))
    return Corpus(train), Corpus(held_out)
