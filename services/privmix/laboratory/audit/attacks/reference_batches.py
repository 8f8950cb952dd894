"""Replaces one user's texts and compares the batches of `privmix evaluate reference`, of which one may differ.

The batches of the published mechanisms are disjoint, and so the epsilon of one is that of all. That is true only if
no other user moves to another batch when one user's texts are replaced.
"""

from collections.abc import Iterator, Sequence

from privmix.laboratory.utility.labelled import Labelled
from privmix.laboratory.utility.reference_texts import ReferenceBatch, batches

ATTACK = "comparison of batches"
_USERS, _REFERENCES, _SEEDS = 200, 16, range(3)
_USER = 50
_Row = tuple[str, str, str]


def batch_faults() -> tuple[str, ...]:
    """Returns which replacements of one user's texts change more than one reference of one batch, as sentences."""
    return tuple(
        f"where {name} replaces a user's text, {moved} of {len(before)} batches change"
        for name, rows in _replaced()
        for seed in _SEEDS
        if (moved := _moved(before := _batches(_rows(), seed), _batches(rows, seed))) > 1
    )


def _rows() -> list[_Row]:
    return [(f"user-{number}", f"text {number}", "ab"[number % 2]) for number in range(_USERS)]


def _replaced() -> Iterator[tuple[str, list[_Row]]]:
    rows = _rows()
    user, text, label = rows[_USER]
    new = {
        "another": ("another",),
        "a pair of texts": ("one", "two"),
        "a long list of texts": (text, *map(str, range(40))),
    }
    for name, texts in new.items():
        yield name, [*rows[:_USER], *((user, each, label) for each in texts), *rows[_USER + 1 :]]


def _batches(rows: Sequence[_Row], seed: int) -> list[ReferenceBatch]:
    users, texts, labels = (tuple(column) for column in zip(*rows, strict=True))
    return batches(Labelled("audit", texts, labels, users), _REFERENCES, seed)


def _moved(before: Sequence[ReferenceBatch], after: Sequence[ReferenceBatch]) -> int:
    """Returns how many batches differ; all of them count where a batch differs in more than one reference."""
    if len(before) != len(after):
        return max(len(before), len(after))
    changed = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    single = all(one.label == other.label and len({*one.texts} ^ {*other.texts}) <= 2 for one, other in changed)
    return len(changed) if single else len(before)
