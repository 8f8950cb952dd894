"""Membership inference by the likelihood-ratio attack, LiRA (Carlini et al. 2022), on shadow ensembles.

Every ensemble is trained on its own half of the users. Each in turn is attacked with what the others teach about a
user's score: one normal distribution where the user was in, one where the user was not.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from services.audit.begun import begun_with
from services.audit.extraction import next_token_chances
from services.audit.models import Models, Said
from services.audit.roc import Roc
from services.audit.worlds import Reals
from services.evaluation.ensembles import Ensemble, has_halves
from services.privacy.protocol import Protocol
from services.training import demo
from services.training.corpus import Corpus, Document
from services.training.errors import InputError
from services.training.files import write_lines
from services.training.options import Resources, TrainingOptions
from services.training.plan import carry_out
from services.training.progress import Display
from services.training.public_model import resolve
from services.training.train import plan

TRAINING = TrainingOptions(rank=4, block=64, batch=2, epochs=3, learning_rate=2e-3, precision="float32")
SALT = "partition.salt"
# Of the scores' standard deviation, where there are too few to estimate it.
_LEAST_DEVIATION = 1e-6


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
        said: of each user, the answers of all ensembles' models on the user's text: those of the first ensemble first,
            its parts' before those of their halves.
        parts: of each ensemble.
        halved: whether the halves of every part have models, too.
    """

    included: NDArray[np.bool_]
    said: Sequence[Said]
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
        InputError: the directory was begun with another size.
        InputError, TrainingError: as `train`.
    """
    begun_with(directory, size)
    _draw(directory, size)
    plans = [
        plan(
            Corpus(_corpus(shadow)),
            shadow,
            parts=size.parts,
            halves=halves or has_halves(shadow),
            options=options,
            salt_file=directory / SALT,
        )
        for shadow in _shadows(directory, size)
    ]
    carry_out(plans, Resources(), display or Display())


def ask(directory: Path, size: Size, top_k: int) -> Shadows:
    """What every model of the shadow ensembles says on one text of each user, after its first tokens."""
    shadows = _shadows(directory, size)
    ensembles = [Ensemble.load(shadow) for shadow in shadows]
    adapters = [
        ensemble.path(adapter) for ensemble in ensembles for adapter in (*ensemble.manifest.parts, *ensemble.halves)
    ]
    models = Models(resolve(), {f"model-{index}": path for index, path in enumerate(adapters)})
    texts: dict[str, Document] = {}
    for document in Corpus(directory / demo.TRAIN):
        texts.setdefault(document.user, document)
    members = [{document.user for document in Corpus(_corpus(shadow))} for shadow in shadows]
    said = [models.continuations(*_split(texts[user].text), top_k) for user in sorted(texts)]
    included = np.array([[user in one for user in sorted(texts)] for one in members])
    return Shadows(included, said, size.parts, has_halves(shadows[0]))


@dataclass(frozen=True)
class Seen:
    """What the attacker sees of one mechanism.

    Attributes:
        tokens: that are asked for about each user, spread evenly over the places of the user's text; None where the
            attacker sees the probabilities themselves, which no service shows.
    """

    protocol: Protocol
    tokens: int | None = None

    def score(self, chances: Reals) -> float:
        """Of a text, from the chance of each of its tokens: their mean log-chance, or how often they come."""
        if self.tokens is None:
            return float(np.log(np.maximum(chances, 1e-9)).mean())
        asked = max(1, self.tokens // len(chances))
        return float(np.random.default_rng().binomial(asked, chances).mean() / asked)


def scores(seen: Seen, shadows: Shadows, draws: int) -> Reals:
    """float64 [shadows, users]: the score of each user's text by what each ensemble releases."""
    found = np.empty(shadows.included.shape)
    for shadow in range(len(found)):
        models = shadows.models(shadow, seen.protocol)
        for user, said in enumerate(shadows.said):
            found[shadow, user] = seen.score(next_token_chances(seen.protocol, said, models, draws))
    return found


def lira(scored: Reals, included: NDArray[np.bool_]) -> tuple[Reals, Reals]:
    """Log-likelihood ratios of members and of others, each ensemble attacked with the rest.

    With few shadows a variance for each user is worse than one for all (Carlini et al. 2022, section VI).
    """
    ratios = np.full(scored.shape, np.nan)
    for target in range(len(scored)):
        rest = np.arange(len(scored)) != target
        inside, outside = (np.where(included[rest] == side, scored[rest], np.nan) for side in (True, False))
        known = (~np.isnan(inside)).any(axis=0) & (~np.isnan(outside)).any(axis=0)
        means = [np.nanmean(side[:, known], axis=0) for side in (inside, outside)]
        residuals = [side[:, known] - mean for side, mean in zip((inside, outside), means, strict=True)]
        deviations = [max(float(np.nanstd(each)), _LEAST_DEVIATION) for each in residuals]
        own = scored[target, known]
        ratios[target, known] = norm.logpdf(own, means[0], deviations[0]) - norm.logpdf(own, means[1], deviations[1])
    valid = ~np.isnan(ratios)
    return ratios[valid & included], ratios[valid & ~included]


def attack(mechanisms: Mapping[str, Seen], shadows: Shadows, draws: int) -> dict[str, Roc]:
    """The curve of every mechanism."""
    return {name: Roc.of(*lira(scores(each, shadows, draws), shadows.included)) for name, each in mechanisms.items()}


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
