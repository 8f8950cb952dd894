"""The ensembles that are evaluated: all of one public model, each what its manifest says."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.engine.engine import AdapterFiles
from services.errors import InputError
from services.training import public_model
from services.training.manifest import FILE, Adapter, Manifest, PrivateTraining


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

    def files(self, adapter: Adapter) -> AdapterFiles:
        """Where the adapter's files are, and how it attends."""
        return AdapterFiles(self.manifest.adapter_path(self.directory, adapter), self.manifest.attention)


def has_halves(directory: Path) -> bool:
    """Whether an ensemble was trained there, and models of its half-parts with it."""
    return (directory / FILE).exists() and bool(Ensemble.load(directory).halves)


@dataclass(frozen=True)
class Ensembles:
    """What is compared.

    Attributes:
        main: the ensemble of the table, that with the most parts; the first of those with as many.
        others: ensembles of other sizes, for the figure over parts.
        finetuned: an ensemble of one part.
        dp_sgd: ensembles of one part that DP-SGD trained, by ascending epsilon.
        base: the public model of all of them.
    """

    main: Ensemble
    others: tuple[Ensemble, ...]
    finetuned: Ensemble | None
    dp_sgd: tuple[Ensemble, ...]
    base: Path

    @classmethod
    def load(cls, directories: Sequence[Path], finetuned: Path | None, dp_sgd: Sequence[Path]) -> Self:
        """Read and verify all manifests.

        Raises:
            InputError: an option's ensemble is missing, damaged, of another public model, of the wrong size, or was
                not trained as the option says.
        """
        if not directories:
            raise InputError("ensemble: name at least one directory")
        several = [Ensemble.load(directory) for directory in directories]
        one = None if finetuned is None else _single("finetuned", finetuned)
        private = [_single("dp-sgd", directory) for directory in dp_sgd]
        base = public_model.resolve(several[0].manifest.base_model)
        named = [("ensemble", each) for each in several]
        named += [("finetuned", one)] if one is not None else []
        named += [("dp-sgd", each) for each in private]
        for option, each in named:
            _check_base(option, each, several[0])
            each.manifest.verify(each.directory, base)
        main = max(several, key=lambda each: each.parts)
        others = tuple(each for each in several if each is not main)
        return cls(main, others, one, tuple(sorted(private, key=_promised)), base)

    @property
    def all(self) -> tuple[Ensemble, ...]:
        finetuned = () if self.finetuned is None else (self.finetuned,)
        return (self.main, *self.others, *finetuned, *self.dp_sgd)

    def dp_sgd_for(self, epsilon: float) -> Ensemble | None:
        """What DP-SGD trained for this budget: the largest that it allows, else the smallest there is."""
        allowed = [each for each in self.dp_sgd if _promised(each) <= epsilon]
        return next(iter(allowed[-1:] or self.dp_sgd[:1]), None)


def _single(option: str, directory: Path) -> Ensemble:
    found = Ensemble.load(directory)
    if found.parts != 1:
        raise InputError(f"{option} {directory}: has {found.parts} parts; name an ensemble of one part")
    return found


def private_training(manifest: Manifest) -> PrivateTraining:
    """What DP-SGD promised when it trained an ensemble.

    Raises:
        InputError: it was not trained so.
    """
    if manifest.dp_sgd is None:
        raise InputError("dp-sgd: this ensemble was not trained by DP-SGD; train one with `privmix train --dp-sgd`")
    return manifest.dp_sgd


def _promised(ensemble: Ensemble) -> float:
    return private_training(ensemble.manifest).epsilon


def _check_base(option: str, one: Ensemble, other: Ensemble) -> None:
    for field, what in (("base_revision", "public model"), ("tokenizer", "tokenizer")):
        found, expected = getattr(one.manifest, field), getattr(other.manifest, field)
        if found != expected:
            raise InputError(
                f"{option} {one.directory}: its {what} is not that of {other.directory} "
                f"({found[:12]}, there {expected[:12]}); only what was trained from one can be compared"
            )
