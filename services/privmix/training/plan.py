"""Plans trainings, one for each directory, and trains all their adapters in one queue.

    run_trainings([train.plan(corpus, Path(str(parts)), parts=parts) for parts in (4, 8)], Resources(), Display())

Entering a plan locks its directory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from privmix.engine import PartKind
from privmix.foundation.errors import WorkError
from privmix.foundation.progress import Display
from privmix.training.base import Base
from privmix.training.directory import adapter_path, finished, remove_others, store
from privmix.training.manifest import Manifest
from privmix.training.options import Resources

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

    def digest(self, output: Path) -> str:
        """Returns the trained adapter's hash.

        Raises:
            WorkError: the adapter is missing or damaged.
        """
        digest = finished(output / self.path, self.fingerprint)
        if digest is None:
            raise WorkError(f"{self.name}: its adapter is missing or damaged; run again to train it")
        return digest


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


OpenPlan = AbstractContextManager[TrainingPlan]


def run_trainings(plans: Iterable[OpenPlan], resources: Resources, display: Display) -> list[Trained]:
    """Trains the missing adapters of all plans, in order, and keeps existing ones.

    Raises:
        InputError: a plan is invalid, the cluster is too small for one adapter, or the options do not fit the model.
        WorkError: another training is writing to one of the directories, or an adapter failed. Finished adapters are
            kept.
    """
    with display, ExitStack() as stack:
        display.say("preparing the public model and reading the corpus")
        trainings = [stack.enter_context(plan) for plan in plans]
        missing = [training.missing() for training in trainings]
        if any(missing):
            _train(list(zip(trainings, missing, strict=True)), resources, display)
        return [training.finish(len(adapters)) for training, adapters in zip(trainings, missing, strict=True)]


def run_training(plan: OpenPlan, resources: Resources | None = None, display: Display | None = None) -> Trained:
    """Trains the missing adapters of one plan. See `run_trainings`."""
    (trained,) = run_trainings([plan], resources or Resources(), display or Display())
    return trained


def _train(
    work: Sequence[tuple[TrainingPlan, Sequence[PlannedAdapter]]], resources: Resources, display: Display
) -> None:
    """Writes texts in this process, and trains the rest in the connected cluster, or in one of its own."""
    from privmix.foundation.fan_out import named
    from privmix.training import tasks

    jobs = {}
    for training, adapters in work:
        prefix = f"{training.output.name}/" if len(work) > 1 else ""
        for adapter in adapters:
            recipe = adapter.recipe()
            jobs[tasks.TrainingTask(prefix + adapter.name, training.base, recipe.work)] = training, adapter, recipe
    texts = [job for job, (training, *_) in jobs.items() if training.part_kind == "text"]
    others = [job for job, (training, *_) in jobs.items() if training.part_kind != "text"]

    def keep(job: tasks.TrainingTask, files: "Files") -> None:
        training, adapter, recipe = jobs[job]
        store(training.output / adapter.path, adapter.fingerprint, {**files, **recipe.beside})

    if texts:
        display.say(f"writing {len(texts)} texts")
    for job in texts:
        try:
            files = job.work(job.base.path, job.base.name, report=lambda _: None)
        except Exception as error:
            raise named(error, job.name) from error
        keep(job, files)
    if others:
        from privmix.foundation.ray_session import connected

        display.say(f"training {len(others)} adapters")
        for job in others:
            if note := jobs[job][2].note:
                display.say(f"{job.name}: {note}")
        with connected():
            for job, files in tasks.train_adapters(others, resources, display):
                keep(job, files)
