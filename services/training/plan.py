"""Trainings that are planned, each for its directory, and their adapters trained in one queue.

    carry_out([train.plan(corpus, Path(str(parts)), parts=parts) for parts in (4, 8)], Resources(), Display())

A plan holds its directory's lock from when it is entered.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from services.errors import WorkError
from services.progress import Display
from services.training.base import Base
from services.training.directory import adapter_path, finished, remove_others, store
from services.training.manifest import Manifest
from services.training.marks import Marks
from services.training.options import Resources

if TYPE_CHECKING:
    from services.training.tasks import Work


@dataclass(frozen=True)
class Trained:
    """What a training did: how many adapters it trained and kept, and how many lines of the corpus it left out."""

    manifest: Manifest
    trained: int
    kept: int
    skipped: int


@dataclass(frozen=True, eq=False)
class Recipe:
    """What makes an adapter's files.

    Attributes:
        work: for a machine that has room.
        beside: files that are kept with those that the work makes.
        note: what people should know of it.
    """

    work: "Work"
    beside: Mapping[str, bytes] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, eq=False)
class Planned:
    """One adapter to be.

    Attributes:
        name: in its ensemble.
        fingerprint: of everything that it is made from.
        recipe: is asked where the adapter is not there yet.
    """

    name: str
    fingerprint: str
    recipe: Callable[[], Recipe]

    @property
    def path(self) -> str:
        return adapter_path(self.name, self.fingerprint)

    def digest(self, output: Path) -> str:
        """The adapter's hash.

        Raises:
            WorkError: it is not there.
        """
        found = finished(output / self.path, self.fingerprint)
        if found is None:
            raise WorkError(f"{self.name}: its adapter is gone or damaged; run again to train it")
        return found


@dataclass(frozen=True, eq=False)
class Training:
    """What is to be in an ensemble's directory.

    Attributes:
        manifest: is asked when all adapters are there.
        marks: of the corpus.
        skipped: how many lines of the corpus were left out.
    """

    output: Path
    base: Base
    adapters: Sequence[Planned]
    manifest: Callable[[], Manifest]
    marks: Marks
    skipped: int

    def missing(self) -> list[Planned]:
        return [each for each in self.adapters if finished(self.output / each.path, each.fingerprint) is None]

    def finish(self, trained: int) -> Trained:
        """Let the manifest name the adapters, and remove what it names no more."""
        manifest = self.manifest()
        self.marks.save(self.output)
        manifest.save(self.output)
        remove_others(self.output, manifest)
        return Trained(manifest, trained, len(self.adapters) - trained, self.skipped)


Plan = AbstractContextManager[Training]


def carry_out(plans: Iterable[Plan], resources: Resources, display: Display) -> list[Trained]:
    """Train what is missing of all plans, in their order; adapters that are there are kept.

    Raises:
        InputError: what a plan raises; the cluster can never hold one adapter; the options do not fit the model.
        WorkError: another training is writing to one of the directories; an adapter failed, and those that were
            finished are kept.
    """
    with display, ExitStack() as stack:
        display.say("preparing the public model and reading the corpus")
        trainings = [stack.enter_context(plan) for plan in plans]
        missing = [training.missing() for training in trainings]
        if any(missing):
            _train(list(zip(trainings, missing, strict=True)), resources, display)
        return [training.finish(len(adapters)) for training, adapters in zip(trainings, missing, strict=True)]


def _train(work: Sequence[tuple[Training, Sequence[Planned]]], resources: Resources, display: Display) -> None:
    from services.ray_session import connected
    from services.training import tasks

    display.say(f"training {sum(len(adapters) for _, adapters in work)} adapters")
    jobs = {}
    for training, adapters in work:
        prefix = f"{training.output.name}/" if len(work) > 1 else ""
        for adapter in adapters:
            name, recipe = prefix + adapter.name, adapter.recipe()
            if recipe.note:
                display.say(f"{name}: {recipe.note}")
            jobs[tasks.Job(name, training.base, recipe.work)] = training, adapter, recipe.beside
    with connected():
        for job, files in tasks.train_adapters(list(jobs), resources, display):
            training, adapter, beside = jobs[job]
            store(training.output / adapter.path, adapter.fingerprint, {**files, **beside})
