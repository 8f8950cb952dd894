"""Shadow ensembles for membership inference: each trained on its own half of the demo corpus's users."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.audit.worlds.models import ModelOutput, Models
from services.audit.worlds.testbed import begun_with
from services.errors import InputError
from services.evaluation.ensembles import Ensemble, has_halves
from services.files import write_lines
from services.privacy.protocol import Protocol
from services.progress import Display
from services.training import demo
from services.training.corpus import Corpus, Document
from services.training.options import Resources, TrainingOptions
from services.training.plan import carry_out
from services.training.public_model import resolve
from services.training.train import plan

TRAINING = TrainingOptions(rank=4, block=64, batch=2, epochs=3, learning_rate=2e-3, precision="float32")
SALT = "partition.salt"


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        users: of the demo corpus; about half of them are in each ensemble.
        shadows: ensembles.
        parts: of each ensemble.
    """

    users: int = 32
    shadows: int = 8
    parts: int = 2


@dataclass(frozen=True, eq=False)
class Shadows:
    """What was trained, and what it says.

    Attributes:
        included: bool [shadows, users].
        outputs: of each user, the answers of all ensembles' models on the user's text: those of the first ensemble
            first, its parts' before those of their halves.
        parts: of each ensemble.
        halved: whether the halves of every part have models, too.
    """

    included: NDArray[np.bool_]
    outputs: Sequence[ModelOutput]
    parts: int
    halved: bool = False

    def models(self, shadow: int, protocol: Protocol) -> range:
        """What the protocol calls its models 0, 1 and so on.

        Raises:
            InputError: they were not trained.
        """
        if protocol.halves and not self.halved:
            raise InputError(f"protocol: {protocol.name} asks models of half-parts, and none were trained")
        each = 3 * self.parts if self.halved else self.parts
        first = shadow * each
        return range(first + self.parts, first + each) if protocol.halves else range(first, first + self.parts)


def train_shadows(
    directory: Path,
    size: Size,
    options: TrainingOptions = TRAINING,
    *,
    halves: bool = False,
    display: Display | None = None,
) -> None:
    """Train the shadow ensembles in ``directory``; what is there already is kept.

    Args:
        halves: train models of the halves of every part, too.

    Raises:
        InputError: the directory was begun with another size; and as `train`.
        WorkError: as `train`.
    """
    begun_with(directory, size)
    _draw(directory, size)
    shadows = _shadows(directory, size)
    # All alike, even where a training of halves was stopped between two ensembles.
    halves = halves or any(map(has_halves, shadows))
    plans = [
        plan(
            Corpus(_corpus(shadow)),
            shadow,
            parts=size.parts,
            halves=halves,
            options=options,
            salt_file=directory / SALT,
        )
        for shadow in shadows
    ]
    carry_out(plans, Resources(), display or Display())


def ask(directory: Path, size: Size, top_k: int) -> Shadows:
    """What every model of the shadow ensembles says on one text of each user, after its first tokens."""
    shadows = _shadows(directory, size)
    ensembles = [Ensemble.load(shadow) for shadow in shadows]
    adapters = [
        ensemble.files(adapter) for ensemble in ensembles for adapter in (*ensemble.manifest.parts, *ensemble.halves)
    ]
    models = Models(resolve(), {f"model-{index}": files for index, files in enumerate(adapters)})
    texts: dict[str, Document] = {}
    for document in Corpus(directory / demo.TRAIN):
        texts.setdefault(document.user, document)
    members = [{document.user for document in Corpus(_corpus(shadow))} for shadow in shadows]
    outputs = [models.continuations(*_split(texts[user].text), top_k) for user in sorted(texts)]
    included = np.array([[user in one for user in sorted(texts)] for one in members])
    return Shadows(included, outputs, size.parts, bool(ensembles[0].halves))


def _draw(directory: Path, size: Size, seed: int = 0) -> None:
    """The corpus of every ensemble, of users chosen by fair coins."""
    if not (directory / demo.TRAIN).exists():
        demo.write_demo_corpus(directory, users=size.users, held_out=0, seed=seed)
    documents = list(Corpus(directory / demo.TRAIN))
    users = sorted({document.user for document in documents})
    coins = random.Random(seed)
    for shadow in _shadows(directory, size):
        members = {user for user in users if coins.random() < 0.5}
        if not _corpus(shadow).exists():
            write_lines(_corpus(shadow), (asdict(document) for document in documents if document.user in members))


def _shadows(directory: Path, size: Size) -> list[Path]:
    return [directory / f"shadow-{index:02d}" for index in range(size.shadows)]


def _corpus(shadow: Path) -> Path:
    return shadow.with_suffix(".jsonl")


def _split(text: str) -> tuple[str, list[str]]:
    """The speaker's label, and what is then said."""
    label, _, said = text.partition(":")
    return f"{label}:", [said]
