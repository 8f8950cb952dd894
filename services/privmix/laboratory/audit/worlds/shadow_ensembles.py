"""Trains shadow ensembles for membership inference, each on its own random half of the demo corpus's users."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import write_lines
from privmix.foundation.progress import Display
from privmix.laboratory.audit.worlds.models import LocalModels, ModelOutput
from privmix.laboratory.audit.worlds.sizes import ShadowSize
from privmix.laboratory.audit.worlds.testbed import SALT, claim_directory
from privmix.laboratory.evaluation.ensembles import TrainedEnsemble, has_halves
from privmix.privacy.protocol import Protocol
from privmix.training import demo
from privmix.training.corpus import Corpus, Document
from privmix.training.options import Resources, TrainingOptions
from privmix.training.plan import run_trainings
from privmix.training.public_model import resolve
from privmix.training.train import plan

TRAINING = TrainingOptions(rank=4, block=64, batch=2, epochs=3, learning_rate=2e-3, precision="float32")


@dataclass(frozen=True, eq=False)
class Shadows:
    """Trained shadow ensembles and their outputs.

    Attributes:
        included: bool [shadows, users], whether the ensemble's corpus contains the user.
        outputs: for each user, the outputs of all ensembles' models on the user's text, ensemble by ensemble; in each,
            the parts' models before the models of half-parts.
        parts: the number of parts of each ensemble.
        halved: whether the halves of every part have models, too.
    """

    included: NDArray[np.bool_]
    outputs: Sequence[ModelOutput]
    parts: int
    halved: bool = False

    def models(self, shadow: int, protocol: Protocol) -> range:
        """Returns the indices of the models that the protocol calls 0, 1 and so on.

        Raises:
            InputError: they were not trained.
        """
        if protocol.halves and not self.halved:
            raise InputError(f"protocol: {protocol.name} needs models of half-parts, and none are trained")
        count = 3 * self.parts if self.halved else self.parts
        first = shadow * count
        return range(first + self.parts, first + count) if protocol.halves else range(first, first + self.parts)


def train_shadows(
    directory: Path,
    size: ShadowSize,
    *,
    halves: bool = False,
    display: Display | None = None,
) -> None:
    """Trains the shadow ensembles in ``directory``. Keeps existing adapters.

    Args:
        halves: train models of the halves of every part, too.

    Raises:
        InputError: the directory has files of another size; and as `train`.
        WorkError: as `train`.
    """
    claim_directory(directory, size)
    _write_corpora(directory, size)
    shadows = _shadows(directory, size)
    # An interrupted training of halves continues for all ensembles, so that all have the same models.
    halves = halves or any(map(has_halves, shadows))
    plans = [
        plan(
            Corpus(_corpus(shadow)),
            shadow,
            parts=size.parts,
            halves=halves,
            options=TRAINING,
            salt_file=directory / SALT,
        )
        for shadow in shadows
    ]
    run_trainings(plans, Resources(), display or Display())


def evaluate_shadows(directory: Path, size: ShadowSize, top_k: int) -> Shadows:
    """Evaluates every model of the shadow ensembles on one text of each user, after the speaker's label."""
    shadows = _shadows(directory, size)
    ensembles = [TrainedEnsemble.load(shadow) for shadow in shadows]
    adapters = [
        ensemble.files(adapter) for ensemble in ensembles for adapter in (*ensemble.manifest.parts, *ensemble.halves)
    ]
    models = LocalModels(resolve(), adapters)
    texts: dict[str, Document] = {}
    for document in Corpus(directory / demo.TRAIN):
        texts.setdefault(document.user, document)
    members = [{document.user for document in Corpus(_corpus(shadow))} for shadow in shadows]
    outputs = [models.continuations(*_split(texts[user].text), top_k) for user in sorted(texts)]
    included = np.array([[user in shadow_members for user in sorted(texts)] for shadow_members in members])
    return Shadows(included, outputs, size.parts, bool(ensembles[0].halves))


def _write_corpora(directory: Path, size: ShadowSize, seed: int = 0) -> None:
    """Writes the corpus of every ensemble; fair coins choose its users."""
    if not (directory / demo.TRAIN).exists():
        demo.write_demo_corpus(directory, users=size.users, held_out=0, seed=seed)
    documents = list(Corpus(directory / demo.TRAIN))
    users = sorted({document.user for document in documents})
    coins = random.Random(seed)
    for shadow in _shadows(directory, size):
        members = {user for user in users if coins.random() < 0.5}
        if not _corpus(shadow).exists():
            rows = (document.row() for document in documents if document.user in members)
            write_lines(_corpus(shadow), rows, private=True)


def _shadows(directory: Path, size: ShadowSize) -> list[Path]:
    return [directory / f"shadow-{index:02d}" for index in range(size.shadows)]


def _corpus(shadow: Path) -> Path:
    return shadow.with_suffix(".jsonl")


def _split(text: str) -> tuple[str, list[str]]:
    """Splits a text into the speaker's label and the speech."""
    label, _, speech = text.partition(":")
    return f"{label}:", [speech]
