"""Loads the ensembles to evaluate and verifies that they match their manifests and share one public model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from privmix.engine.engine import AdapterFiles
from privmix.foundation.errors import InputError
from privmix.training import public_model
from privmix.training.manifest import FILE, Adapter, Manifest, PrivateTraining
from privmix.training.private_base import is_trained


@dataclass(frozen=True)
class TrainedEnsemble:
    """Represents a directory that `privmix train` wrote."""

    directory: Path
    manifest: Manifest

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Loads the manifest. Raises ManifestError if it is missing or invalid."""
        return cls(directory, Manifest.load(directory))

    @property
    def parts(self) -> int:
        return len(self.manifest.parts)

    @cached_property
    def base(self) -> Path:
        """The directory of its base model. Raises PublicModelError if it is missing."""
        return public_model.resolve(self.manifest.base_model)

    @property
    def base_training(self) -> PrivateTraining | None:
        """The training of its private base; None on a public model."""
        return None if self.manifest.private_base is None else self.manifest.private_base.training

    @property
    def public_revision(self) -> str:
        """The revision of the public model, also of the one under a private base."""
        based = self.manifest.private_base
        return self.manifest.base_revision if based is None else based.origin

    @property
    def halves(self) -> tuple[Adapter, ...]:
        """The half-part adapters in model order: 2i and 2i + 1 belong to part i. Empty if none were trained."""
        return tuple(half for part in self.manifest.parts for half in part.halves or ())

    def files(self, adapter: Adapter) -> AdapterFiles:
        """Returns the adapter's files and the kind of part that it is."""
        return AdapterFiles(self.directory / adapter.path, self.manifest.part_kind)


def has_halves(directory: Path) -> bool:
    """Returns whether the directory has an ensemble with models of half-parts."""
    return (directory / FILE).exists() and bool(TrainedEnsemble.load(directory).halves)


@dataclass(frozen=True)
class ComparedEnsembles:
    """Holds the ensembles to compare.

    Attributes:
        main: the ensemble of the table: the first one with the most parts, on the public model if any is.
        others: the other ensembles.
        finetuned: an ensemble of one part.
        dp_sgd: ensembles of one part trained with DP-SGD, by ascending epsilon.
        base: the directory of their public model, which private bases were trained from too.
    """

    main: TrainedEnsemble
    others: tuple[TrainedEnsemble, ...]
    finetuned: TrainedEnsemble | None
    dp_sgd: tuple[TrainedEnsemble, ...]
    base: Path

    @classmethod
    def load(cls, directories: Sequence[Path], finetuned: Path | None, dp_sgd: Sequence[Path]) -> Self:
        """Reads and verifies all manifests.

        Raises:
            InputError: an ensemble is missing or damaged, has another public model or the wrong size, or was not
                trained as its option requires.
        """
        if not directories:
            raise InputError("ensemble: give at least one directory")
        sizes = [TrainedEnsemble.load(directory) for directory in directories]
        reference = None if finetuned is None else _single("finetuned", finetuned)
        private = [_single("dp-sgd", directory) for directory in dp_sgd]
        by_option = [("ensemble", ensemble) for ensemble in sizes]
        by_option += [("finetuned", reference)] if reference is not None else []
        by_option += [("dp-sgd", ensemble) for ensemble in private]
        for option, ensemble in by_option:
            _check_base(option, ensemble, sizes[0])
            ensemble.manifest.verify(ensemble.directory, ensemble.base)
        base = _public_model([ensemble for _, ensemble in by_option])
        main = max(sizes, key=lambda ensemble: (ensemble.base_training is None, ensemble.parts))
        others = tuple(ensemble for ensemble in sizes if ensemble is not main)
        return cls(main, others, reference, tuple(sorted(private, key=_promised)), base)

    @property
    def all(self) -> tuple[TrainedEnsemble, ...]:
        finetuned = () if self.finetuned is None else (self.finetuned,)
        return (self.main, *self.others, *finetuned, *self.dp_sgd)

    @property
    def on_bases(self) -> tuple[TrainedEnsemble, ...]:
        """One ensemble on each private base."""
        based = (ensemble for ensemble in (self.main, *self.others) if ensemble.base_training is not None)
        return tuple({ensemble.manifest.base_revision: ensemble for ensemble in based}.values())

    def dp_sgd_for(self, epsilon: float) -> TrainedEnsemble | None:
        """Returns the DP-SGD ensemble with the largest epsilon within the budget, or else the smallest epsilon."""
        allowed = [ensemble for ensemble in self.dp_sgd if _promised(ensemble) <= epsilon]
        return next(iter(allowed[-1:] or self.dp_sgd[:1]), None)


def _single(option: str, directory: Path) -> TrainedEnsemble:
    ensemble = TrainedEnsemble.load(directory)
    if ensemble.parts != 1:
        raise InputError(f"{option} {directory}: has {ensemble.parts} parts; give an ensemble of one part")
    return ensemble


def private_training(manifest: Manifest) -> PrivateTraining:
    """Returns the record of an ensemble's DP-SGD training.

    Raises:
        InputError: the ensemble was not trained with DP-SGD.
    """
    if manifest.dp_sgd is None:
        raise InputError("dp-sgd: this ensemble was not trained by DP-SGD; train one with `privmix train-base`")
    return manifest.dp_sgd


def _promised(ensemble: TrainedEnsemble) -> float:
    return private_training(ensemble.manifest).epsilon


def _public_model(ensembles: Sequence[TrainedEnsemble]) -> Path:
    """Returns the directory of the public model under all of them.

    Raises:
        InputError: all of them are on private bases, and none says where the public model is.
    """
    for ensemble in ensembles:
        if ensemble.base_training is None:
            return ensemble.base
    directories = [ensemble.base.parent for ensemble in ensembles if is_trained(ensemble.base.parent)]
    for name in (*(Manifest.load(directory).base_model for directory in directories), public_model.DEFAULT):
        path = public_model.resolve(name)
        if public_model.revision(path) == ensembles[0].public_revision:
            return path
    raise InputError(
        f"ensemble {ensembles[0].directory}: the public model under its private base is not found; name the DP-SGD "
        "training of the base too (--dp-sgd)"
    )


def _check_base(option: str, ensemble: TrainedEnsemble, first: TrainedEnsemble) -> None:
    for label, actual, expected in (
        ("public model", ensemble.public_revision, first.public_revision),
        ("tokenizer", ensemble.manifest.tokenizer, first.manifest.tokenizer),
    ):
        if actual != expected:
            raise InputError(
                f"{option} {ensemble.directory}: its {label} ({actual[:12]}) differs from that of {first.directory} "
                f"({expected[:12]}); compare only ensembles with the same public model"
            )
