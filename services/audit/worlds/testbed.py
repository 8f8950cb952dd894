"""A testbed: a planted corpus, an ensemble and one model trained on it, and what they say on the secrets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.audit.worlds.canaries import CORPUS, Canary, candidates, plant, read
from services.audit.worlds.models import ModelOutput, Models
from services.errors import InputError
from services.evaluation.ensembles import Ensemble, has_halves
from services.files import write_atomically
from services.privacy.protocol import Protocol
from services.progress import Display
from services.training.corpus import Corpus
from services.training.manifest import FILE
from services.training.options import Resources, TrainingOptions
from services.training.partition import part_of, read_salt
from services.training.plan import carry_out
from services.training.public_model import resolve
from services.training.train import plan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TRAINING = TrainingOptions(rank=8, block=64, batch=4, epochs=10, learning_rate=2e-3)
"""Enough for a model to learn by heart what it sees a few dozen times."""

# The sizes that a directory was begun with: adapters of other sizes must not be taken for those asked for.
SIZE = "size.json"
ENSEMBLE, SINGLE, SALT = "ensemble", "single", "partition.salt"


@dataclass(frozen=True)
class Size:
    """How large the testbed is.

    Attributes:
        users: ordinary people of the demo corpus.
        planted: people with a secret, each included by a fair coin.
        repetitions: how often an included one's text is in the corpus.
        parts: of the ensemble.
    """

    users: int = 48
    planted: int = 16
    repetitions: int = 24
    parts: int = 4


@dataclass(frozen=True, eq=False)
class Testbed:
    """What there is to attack.

    Attributes:
        parts: how many, N; models 0 … N - 1 are theirs, model N is that of the whole corpus, and those of the halves of
            the parts follow where they were trained.
        outputs: the models' answers on each canary's candidates, the true secret first.
        part: the part to which each canary's user belongs.
    """

    parts: int
    outputs: Mapping[Canary, ModelOutput]
    part: Mapping[Canary, int]

    @property
    def canaries(self) -> Sequence[Canary]:
        """Those that are in the corpus."""
        return [canary for canary in self.outputs if canary.included]

    def models(self, protocol: Protocol) -> range:
        """What the protocol calls its models 0, 1 and so on.

        Raises:
            InputError: they were not trained.
        """
        wanted = range(self.parts + 1, 3 * self.parts + 1) if protocol.halves else range(self.parts)
        if any(len(outputs.models) < wanted.stop for outputs in self.outputs.values()):
            raise InputError(
                f"protocol: {protocol.name} asks models of half-parts, and none were trained; "
                f"run `privmix audit extraction --protocol {protocol.name}` first"
            )
        return wanted


def begun_with(directory: Path, size: "DataclassInstance") -> None:
    """Begins ``directory``, or checks that it was begun with this size.

    Raises:
        InputError: it was begun with other sizes, or for another attack.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path, wanted = directory / SIZE, asdict(size)
    if not path.exists():
        write_atomically(path, json.dumps(wanted).encode())
    before = json.loads(path.read_text())
    if before.keys() != wanted.keys():
        raise InputError(f"directory: {directory} was begun for another attack; name another --directory")
    for name, value in wanted.items():
        if before[name] != value:
            raise InputError(
                f"{name}: {directory} was begun with {before[name]}, not {value}; ask for that, or name another "
                "--directory"
            )


def train_testbed(
    directory: Path,
    size: Size,
    options: TrainingOptions = TRAINING,
    *,
    halves: bool = False,
    display: Display | None = None,
) -> tuple[Canary, ...]:
    """Plant and train in ``directory``; what is there already is kept.

    Args:
        halves: train models of the halves of every part, too.

    Raises:
        InputError: the directory was begun with another size; and as `train`.
        WorkError: as `train`.
    """
    begun_with(directory, size)
    canaries = plant(directory, users=size.users, planted=size.planted, repetitions=size.repetitions)
    plans = [
        plan(
            Corpus(directory / CORPUS),
            directory / name,
            parts=parts,
            halves=name == ENSEMBLE and (halves or has_halves(directory / name)),
            options=options,
            salt_file=directory / SALT,
        )
        for name, parts in ((SINGLE, 1), (ENSEMBLE, size.parts))
    ]
    carry_out(plans, Resources(), display or Display())
    return canaries


def again(directory: Path, count: int = 2, top_k: int = 64) -> Testbed:
    """The testbed that was trained in ``directory`` before.

    Raises:
        InputError: there is none.
    """
    if not (directory / SINGLE / FILE).exists():
        raise InputError(f"{directory}: nothing is trained there; run `privmix audit extraction` first")
    return ask(directory, read(directory), count, top_k)


def ask(directory: Path, canaries: Sequence[Canary], count: int, top_k: int) -> Testbed:
    """What the models of a trained testbed say on ``count`` candidates for each canary, on the likeliest tokens."""
    ensemble, single = (Ensemble.load(directory / name) for name in (ENSEMBLE, SINGLE))
    adapters = (
        *map(ensemble.files, ensemble.manifest.parts),
        *map(single.files, single.manifest.parts),
        *map(ensemble.files, ensemble.halves),
    )
    models = Models(resolve(), {f"model-{index}": files for index, files in enumerate(adapters)})
    outputs = {canary: models.continuations(canary.prompt, candidates(canary, count), top_k) for canary in canaries}
    parts, salt = ensemble.parts, read_salt(directory / SALT)
    return Testbed(parts, outputs, {canary: part_of(canary.user, salt, parts) for canary in canaries})
