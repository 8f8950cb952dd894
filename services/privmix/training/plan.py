"""Plans the training of a directory, and trains the adapters that it lacks.

    run_training(train.plan(corpus, Path("ensemble"), parts=8), Resources(), Display())

Entering a plan locks its directory.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from privmix.engine import PartKind
from privmix.foundation.errors import WorkError
from privmix.foundation.progress import Display
from privmix.training.base import Base
from privmix.training.directory import adapter_path, ensemble_id, finished, remove_others, store
from privmix.training.manifest import Adapter, Manifest, Part, PrivateTraining
from privmix.training.options import Resources, TrainingOptions

if TYPE_CHECKING:
    from privmix.training.adapter import Files
    from privmix.training.tasks import Work


@dataclass(frozen=True)
class Trained:
    """Reports the result of a training.

    Attributes:
        trained, kept: the numbers of adapters.
        skipped: the numbers of bad rows of the corpus by kind, which are private.
    """

    manifest: Manifest
    trained: int
    kept: int
    skipped: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Recipe:
    """Says how to train an adapter.

    Attributes:
        work: the function that returns the adapter's files. It runs as a Ray task; for a text, in this process.
        beside: further files to store with the adapter.
        note: information for the operator.
    """

    work: "Work"
    beside: Mapping[str, bytes] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, eq=False)
class PlannedAdapter:
    """Describes an adapter that an ensemble needs.

    Attributes:
        name: the adapter's name in its ensemble.
        fingerprint: a keyed hash of all inputs of its training.
        recipe: returns its recipe. It is called only if the adapter does not exist yet.
    """

    name: str
    fingerprint: str
    recipe: Callable[[], Recipe]

    @property
    def path(self) -> str:
        return adapter_path(self.name, self.fingerprint)

    def trained(self, output: Path) -> Adapter:
        """Returns the trained adapter as a manifest describes it.

        Raises:
            WorkError: the adapter is missing or damaged.
        """
        digest = finished(output / self.path, self.fingerprint)
        if digest is None:
            raise WorkError(f"{self.name}: its adapter is missing or damaged; run again to train it")
        return Adapter(name=self.name, path=self.path, sha256=digest)


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """Describes the training of one ensemble.

    Attributes:
        part_kind: what the adapters are.
        manifest: returns the manifest. It is called once all adapters exist.
        skipped: the numbers of skipped rows of the corpus by kind.
    """

    output: Path
    base: Base
    adapters: Sequence[PlannedAdapter]
    part_kind: PartKind
    manifest: Callable[[], Manifest]
    skipped: Mapping[str, int]

    def missing(self) -> list[PlannedAdapter]:
        return [
            adapter for adapter in self.adapters if finished(self.output / adapter.path, adapter.fingerprint) is None
        ]

    def finish(self, trained: int) -> Trained:
        """Writes the manifest and removes the adapters that it does not name."""
        manifest = self.manifest()
        manifest.save(self.output)
        remove_others(self.output, manifest)
        return Trained(manifest, trained, len(self.adapters) - trained, self.skipped)


def manifest_of(
    output: Path,
    base: Base,
    salt_id: str,
    options: TrainingOptions,
    parts: tuple[Part, ...],
    private: PrivateTraining | None = None,
    *,
    imported: bool = False,
) -> Manifest:
    """Returns the manifest of parts, or of the one part that was trained with DP-SGD."""
    return Manifest(
        ensemble=ensemble_id(output),
        base_model=base.name,
        base_revision=base.revision,
        tokenizer=base.tokenizer,
        salt_id=salt_id,
        part_kind=options.part_kind,
        private_base=base.private,
        parts=parts,
        imported=imported,
        dp_sgd=private,
    )


OpenPlan = AbstractContextManager[TrainingPlan]


def run_training(plan: OpenPlan, resources: Resources | None = None, display: Display | None = None) -> Trained:
    """Trains the missing adapters of a plan and keeps existing ones.

    Raises:
        InputError: the plan is invalid, the cluster is too small for one adapter, or the options do not fit the model.
        WorkError: another training is writing to the directory, or an adapter failed. Finished adapters are kept.
    """
    with display or Display() as shown:
        shown.say("preparing the public model and reading the corpus")
        with plan as training:
            missing = training.missing()
            if missing:
                _train(training, missing, resources or Resources(), shown)
            return training.finish(len(missing))


def _train(training: TrainingPlan, adapters: Sequence[PlannedAdapter], resources: Resources, display: Display) -> None:
    """Writes texts in this process, and trains adapters in the connected cluster, or in one of its own."""
    from privmix.foundation.fan_out import named
    from privmix.training import tasks

    base, recipes = training.base, {adapter.name: adapter.recipe() for adapter in adapters}
    planned = {adapter.name: adapter for adapter in adapters}

    def keep(name: str, files: "Files") -> None:
        adapter, beside = planned[name], recipes[name].beside
        store(training.output / adapter.path, adapter.fingerprint, {**files, **beside})

    if training.part_kind == "text":
        display.say(f"writing {len(recipes)} texts")
        for name, recipe in recipes.items():
            try:
                files = recipe.work(base.path, base.name, report=lambda _: None)
            except Exception as error:
                raise named(error, name) from error
            keep(name, files)
        return
    from privmix.foundation.ray_session import connected

    display.say(f"training {len(recipes)} adapters")
    for name, recipe in recipes.items():
        if recipe.note:
            display.say(f"{name}: {recipe.note}")
    work = {name: recipe.work for name, recipe in recipes.items()}
    with connected():
        for name, files in tasks.train_adapters(base, work, resources, display):
            keep(name, files)
