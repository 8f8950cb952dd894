"""The ensembles that are evaluated: all of one public model, each what its manifest says."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.training import public_model
from services.training.errors import InputError
from services.training.manifest import Adapter, Manifest


@dataclass(frozen=True)
class Ensemble:
    """A directory that `privmix train` wrote."""

    directory: Path
    manifest: Manifest

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Raises ManifestError where there is none."""
        return cls(directory, Manifest.load(directory))

    @property
    def parts(self) -> int:
        return len(self.manifest.parts)

    @property
    def halves(self) -> tuple[Adapter, ...]:
        """In the order of a protocol's models: 2i and 2i + 1 are those of part i; none where none were trained."""
        return tuple(half for part in self.manifest.parts for half in part.halves or ())


@dataclass(frozen=True)
class Ensembles:
    """What is compared.

    Attributes:
        main: the ensemble of the table, that with the most parts; the first of those with as many.
        others: ensembles of other sizes, for the figure over parts.
        finetuned, dp_sgd: ensembles of one part.
        base: the public model of all of them.
    """

    main: Ensemble
    others: tuple[Ensemble, ...]
    finetuned: Ensemble | None
    dp_sgd: Ensemble | None
    base: Path

    @classmethod
    def load(cls, directories: Sequence[Path], finetuned: Path | None, dp_sgd: Path | None) -> Self:
        """Read and verify all manifests.

        Raises:
            InputError: an option's ensemble is missing, damaged, of another public model, or of the wrong size.
        """
        if not directories:
            raise InputError("ensemble: name at least one directory")
        several = [Ensemble.load(directory) for directory in directories]
        one, private = _single("finetuned", finetuned), _single("dp-sgd", dp_sgd)
        base = public_model.resolve(several[0].manifest.base_model)
        named = [("ensemble", each) for each in several]
        named += [(option, each) for option, each in (("finetuned", one), ("dp-sgd", private)) if each is not None]
        for option, each in named:
            _check_base(option, each, several[0])
            each.manifest.verify(each.directory, base)
        main = max(several, key=lambda each: each.parts)
        return cls(main, tuple(each for each in several if each is not main), one, private, base)

    @property
    def all(self) -> tuple[Ensemble, ...]:
        return tuple(each for each in (self.main, *self.others, self.finetuned, self.dp_sgd) if each is not None)


def _single(option: str, directory: Path | None) -> Ensemble | None:
    if directory is None:
        return None
    found = Ensemble.load(directory)
    if found.parts != 1:
        raise InputError(f"{option} {directory}: has {found.parts} parts; name an ensemble of one part")
    return found


def _check_base(option: str, one: Ensemble, other: Ensemble) -> None:
    for field, what in (("base_revision", "public model"), ("tokenizer", "tokenizer")):
        found, expected = getattr(one.manifest, field), getattr(other.manifest, field)
        if found != expected:
            raise InputError(
                f"{option} {one.directory}: its {what} is not that of {other.directory} "
                f"({found[:12]}, there {expected[:12]}); only what was trained from one can be compared"
            )
