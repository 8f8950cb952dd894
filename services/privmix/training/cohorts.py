"""Keeps cohorts apart: ensembles of different users, who therefore have the epsilon of one ensemble and not the sum.

A person is in at most one cohort. So their text changes the answers of one ensemble alone, whatever clients ask the
others, and the loss is that of their own cohort (parallel composition). Manifests record which ensembles were kept
apart, so that a service can check it.

An ensemble keeps the marks of all users whose text it was ever trained on, because its releases about them stay. A
record names the other ensemble and the digest of its marks. So it proves nothing after the other one gets new text.

The users of a private base pay for it, so they belong to the ensembles on it, too. Two ensembles may have one base: a
person pays for it once, within the promise of the cohort that they are in.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from privmix.foundation.errors import InputError
from privmix.training.corpus import Document
from privmix.training.directory import SALT
from privmix.training.manifest import FILE as MANIFEST
from privmix.training.manifest import Apart, Manifest
from privmix.training.marks import Marks
from privmix.training.partition import read_salt


class EarlierEnsembles:
    """Recognises the users of earlier ensembles, now and ever.

    Raises:
        InputError: an earlier ensemble has no manifest, marks or salt, or other ones than those of its last training.
    """

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        self._earlier = {directory: Manifest.load(directory) for directory in directories}
        self._marks = [_marks(directory, manifest) for directory, manifest in self._earlier.items()]

    def have_user(self, document: Document) -> bool:
        return any(marks.has_user(document) for marks in self._marks)

    def apart_from(self, output: Path, before: Marks, now: Marks) -> tuple[Apart, ...]:
        """Returns the ensembles that share no user with the one in `output` after its training.

        Args:
            before: the marks of all earlier trainings of the ensemble in `output`.
            now: the marks of the documents of its training, which are of no user of the earlier ensembles.

        Raises:
            InputError: users of the ensemble in `output` could be in one that it was or is to be kept apart from.
        """
        previous = Manifest.load(output) if (output / MANIFEST).exists() else None
        for directory, manifest in self._earlier.items():
            recorded = previous and (previous.is_apart_from(manifest) or manifest.is_apart_from(previous))
            if not (before <= now or recorded):
                raise InputError(
                    f"earlier {directory}: the ensemble in {output} was trained on text that this corpus does not "
                    "contain, and users of that text may be in both; train into another directory"
                )
        apart = {manifest.ensemble: _as_now(manifest) for manifest in self._earlier.values()}
        for record in previous.disjoint_from if previous else ():
            if record.ensemble not in apart and not now <= before:
                raise InputError(
                    f"earlier: the ensemble in {output} was kept apart from the ensemble {record.ensemble}, and this "
                    "corpus has new text; name that ensemble's directory, too, or train into another directory"
                )
            apart.setdefault(record.ensemble, record)
        return tuple(apart.values())


def _as_now(manifest: Manifest) -> Apart:
    return Apart(ensemble=manifest.ensemble, marks=manifest.marks or "")


def _marks(directory: Path, manifest: Manifest) -> Marks:
    if not (directory / SALT).exists():
        raise InputError(
            f"earlier {directory}: has no {SALT}, without which its users cannot be recognised; copy it there"
        )
    if manifest.marks is None:
        raise InputError(f"earlier {directory}: its manifest does not name its marks; run its training again")
    return Marks.of_ensemble(directory, read_salt(directory / SALT))


def not_apart(manifests: Mapping[str, Manifest]) -> tuple[str, str] | None:
    """Returns the names of two ensembles that may share users, as their manifests record; None if all are apart."""
    for (name, first), (other, second) in combinations(manifests.items(), 2):
        parts_are_apart = first.is_apart_from(second) or second.is_apart_from(first)
        if not (parts_are_apart and _is_apart_from_base(first, second) and _is_apart_from_base(second, first)):
            return name, other
    return None


def _is_apart_from_base(ensemble: Manifest, other: Manifest) -> bool:
    """Returns whether nobody pays for the other ensemble's private base in addition to this ensemble's promise."""
    base = other.private_base
    if base is None or base == ensemble.private_base:
        return True
    # Nothing records whether two bases share users.
    return ensemble.private_base is None and ensemble.is_apart_from_users_of(base)
