"""Trains a testbed: a planted corpus, an ensemble and a single model on it, and their outputs on the secrets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from privmix.foundation.errors import InputError
from privmix.foundation.files import write_atomically
from privmix.foundation.options import Options
from privmix.foundation.progress import Display
from privmix.laboratory.audit.canaries import CORPUS, Canary, plant, read
from privmix.laboratory.audit.local_models import ModelOutput, read_outputs
from privmix.laboratory.audit.sizes import PlantedSize
from privmix.laboratory.evaluation.ensembles import TrainedEnsemble, has_halves
from privmix.privacy.protocol import Protocol
from privmix.training.corpus import Corpus
from privmix.training.manifest import FILE
from privmix.training.options import TrainingOptions
from privmix.training.partition import part_of, read_salt
from privmix.training.plan import run_training
from privmix.training.public_model import resolve
from privmix.training.train import plan

TRAINING = TrainingOptions(rank=8, block=64, batch=4, epochs=10, learning_rate=2e-3)
"""Enough training for a model to memorize a text that it sees a few dozen times."""

# Records the size of a directory's testbed, so that a later command cannot mix adapters of different sizes.
SIZE = "size.json"
ENSEMBLE, SINGLE, SALT = "ensemble", "single", "partition.salt"


@dataclass(frozen=True, eq=False)
class Testbed:
    """The outputs of the trained models on the canaries.

    Attributes:
        parts: N, the number of parts. Models 0 … N - 1 are the parts' models, model N is the model of the whole corpus,
            and the models of half-parts follow if they are trained.
        outputs: the models' outputs on each canary's secret.
        part: the part of each canary's user.
    """

    parts: int
    outputs: Mapping[Canary, ModelOutput]
    part: Mapping[Canary, int]

    @property
    def canaries(self) -> Sequence[Canary]:
        """The canaries in the corpus."""
        return [canary for canary in self.outputs if canary.included]

    def models(self, protocol: Protocol) -> range:
        """Returns the indices of the models that the protocol calls 0, 1 and so on.

        Raises:
            InputError: they were not trained.
        """
        wanted = range(self.parts + 1, 3 * self.parts + 1) if protocol.halves else range(self.parts)
        if any(len(outputs.models) < wanted.stop for outputs in self.outputs.values()):
            raise InputError(
                f"protocol: {protocol.name} needs models of half-parts, and none are trained; "
                f"run `privmix audit extraction --protocol {protocol.name}` first"
            )
        return wanted


def claim_directory(directory: Path, size: Options) -> None:
    """Records the size in ``directory``, or checks that the recorded size is the same.

    Raises:
        InputError: the directory has another size, or belongs to another attack.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / SIZE
    if not path.exists():
        write_atomically(path, size.model_dump_json().encode())
    recorded, wanted = json.loads(path.read_bytes()), size.model_dump(mode="json")
    if recorded != wanted:
        raise InputError(
            f"directory: {directory} was made with {recorded}, not {wanted}; give the same options, or choose another "
            "--directory"
        )


def train_testbed(
    directory: Path,
    size: PlantedSize,
    *,
    halves: bool = False,
    display: Display | None = None,
) -> tuple[Canary, ...]:
    """Plants canaries in a corpus and trains on it in ``directory``. Keeps existing files.

    Args:
        halves: train models of the halves of every part, too.

    Raises:
        InputError: the directory has files of another size; and as `train`.
        WorkError: as `train`.
    """
    claim_directory(directory, size)
    canaries = plant(
        directory, users=size.users, planted=size.planted, repetitions=size.repetitions, digits=size.digits
    )
    plans = [
        plan(
            Corpus(directory / CORPUS),
            directory / name,
            parts=parts,
            halves=name == ENSEMBLE and (halves or has_halves(directory / name)),
            options=TRAINING,
            salt_file=directory / SALT,
        )
        for name, parts in ((SINGLE, 1), (ENSEMBLE, size.parts))
    ]
    for each in plans:
        run_training(each, display=display)
    return canaries


def planted(directory: Path) -> tuple[tuple[Canary, ...], TrainedEnsemble]:
    """Returns the canaries of a trained testbed, and its model of the whole corpus.

    Raises:
        InputError: the directory has none.
    """
    if not (directory / SINGLE / FILE).exists():
        raise InputError(f"{directory}: there is no trained testbed; run `privmix audit extraction` first")
    return read(directory), TrainedEnsemble.load(directory / SINGLE)


def evaluate_testbed(directory: Path, canaries: Sequence[Canary], top_k: int) -> Testbed:
    """Evaluates the models of a trained testbed on each secret, with the ``top_k`` best tokens."""
    ensemble, single = (TrainedEnsemble.load(directory / name) for name in (ENSEMBLE, SINGLE))
    adapters = (
        *map(ensemble.files, ensemble.manifest.parts),
        *map(single.files, single.manifest.parts),
        *map(ensemble.files, ensemble.halves),
    )
    found = read_outputs(resolve(), adapters, [(canary.prompt, canary.secret) for canary in canaries], top_k)
    parts, salt = ensemble.parts, read_salt(directory / SALT)
    part = {canary: part_of(canary.user, salt, parts) for canary in canaries}
    return Testbed(parts, dict(zip(canaries, found, strict=True)), part)
