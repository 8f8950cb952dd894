"""Membership inference by the likelihood-ratio attack, LiRA (Carlini et al. 2022), on shadow ensembles.

Every ensemble is trained on its own half of the users. Each in turn is attacked with what the others teach about a
user's score: one normal distribution where the user was in, one where the user was not.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from transformers import AutoTokenizer

from services.audit.extraction import next_token_chances
from services.audit.models import Models, Said
from services.audit.roc import Roc
from services.audit.worlds import Reals
from services.privacy.protocol import Protocol
from services.training import demo
from services.training.adapter import train_adapter
from services.training.corpus import Corpus, Document
from services.training.files import building, write_atomically
from services.training.options import TrainingOptions
from services.training.packing import tokenize
from services.training.partition import Partition
from services.training.public_model import resolve

TRAINING = TrainingOptions(rank=4, block=64, batch=2, epochs=3, learning_rate=2e-3, precision="float32")
MEMBERS = "members.json"
_SALT = bytes(32)
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
        said: of each user, the answers of all ensembles' models on the user's text: those of the first ensemble first.
        parts: of each ensemble.
    """

    included: NDArray[np.bool_]
    said: Sequence[Said]
    parts: int


def train_shadows(
    directory: Path, size: Size, options: TrainingOptions, report: Callable[[str], None], seed: int = 0
) -> None:
    """Train the shadow ensembles; adapters that are there already are kept."""
    if not (directory / MEMBERS).exists():
        demo.write_demo_corpus(directory, users=size.users, held_out=0, seed=seed)
        users = sorted({document.user for document in Corpus(directory / demo.TRAIN)})
        coins = random.Random(seed)
        members = [[user for user in users if coins.random() < 0.5] for _ in range(size.shadows)]
        write_atomically(directory / MEMBERS, json.dumps(members).encode())
    base = resolve()
    tokenizer = AutoTokenizer.from_pretrained(base)
    partition = Partition(_SALT, size.parts)
    for shadow, inside in enumerate(_members(directory)):
        documents = [document for document in Corpus(directory / demo.TRAIN) if document.user in inside]
        for share, tokens in tokenize(documents, tokenizer, partition).items():
            place = directory / _name(shadow, share.part)
            if not place.exists():
                report(f"shadow ensemble {shadow + 1} of {size.shadows}, {share.name}")
                files = train_adapter(base, str(base), tokens, options, share.part, lambda _: None)
                with building(place) as unfinished:
                    for name, content in files.items():
                        (unfinished / name).write_bytes(content)


def ask(directory: Path, size: Size, top_k: int) -> Shadows:
    """What every model of the shadow ensembles says on one text of each user, after its first tokens."""
    adapters = {
        _name(shadow, part): directory / _name(shadow, part)
        for shadow in range(size.shadows)
        for part in range(size.parts)
    }
    models = Models(resolve(), adapters)
    texts: dict[str, Document] = {}
    for document in Corpus(directory / demo.TRAIN):
        texts.setdefault(document.user, document)
    members = _members(directory)
    said = [models.continuations(*_split(texts[user].text), top_k) for user in sorted(texts)]
    return Shadows(np.array([[user in one for user in sorted(texts)] for one in members]), said, size.parts)


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
        models = range(shadow * shadows.parts, (shadow + 1) * shadows.parts)
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


def _members(directory: Path) -> list[list[str]]:
    members: list[list[str]] = json.loads((directory / MEMBERS).read_text())
    return members


def _name(shadow: int, part: int) -> str:
    return f"shadow-{shadow:02d}-part-{part:02d}"


def _split(text: str) -> tuple[str, list[str]]:
    """The speaker's label, and what is then said."""
    label, _, said = text.partition(":")
    return f"{label}:", [said]
