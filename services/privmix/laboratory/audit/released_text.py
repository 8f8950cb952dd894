"""Audits released text alone: a model that is trained on it shows which canaries were in the private text.

The attacker has the texts and a list of canaries, and no access to the service (Meeus et al. 2025, "The canary's
echo"). The score of a canary is what training on the texts adds to the log-probability of its secret. A fair coin put
each canary into the private text, so the guesses of one run bound epsilon from below (`bounds.one_run_epsilon`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import write_lines
from privmix.foundation.progress import Display
from privmix.generation.card import load
from privmix.laboratory.audit.bounds import area, correct_guesses, one_run_epsilon
from privmix.laboratory.audit.canaries import Canary
from privmix.laboratory.audit.finding import CERTAIN, Finding
from privmix.laboratory.audit.local_models import read_outputs
from privmix.laboratory.audit.testbed import TRAINING
from privmix.laboratory.evaluation.ensembles import TrainedEnsemble
from privmix.privacy.arrays import Reals
from privmix.privacy.events import GuaranteeStatus
from privmix.training.corpus import Corpus
from privmix.training.options import TrainingOptions
from privmix.training.plan import run_training
from privmix.training.public_model import resolve
from privmix.training.train import plan

_CORPUS, _MODEL = "released.jsonl", "released"


@dataclass(frozen=True)
class ReleasedTexts:
    """Texts and the guarantee that their card states.

    Attributes:
        epsilon: infinite without a promise.
    """

    name: str
    texts: tuple[str, ...]
    epsilon: float = math.inf
    delta: float = 0.0
    status: GuaranteeStatus = "none"


def read_released(job: Path) -> ReleasedTexts:
    """Reads a job of `privmix generate`.

    Raises:
        InputError: a line or the card is missing or invalid, or there is no text.
    """
    lines, card = load(job)
    texts = tuple(line["text"] for line in lines)
    if not any(text.strip() for text in texts):
        raise InputError(f"texts {job}: has no text")
    if card["epsilon"] is None:
        return ReleasedTexts(job.name, texts)
    return ReleasedTexts(job.name, texts, card["epsilon"], card["delta"], _status(card["guarantee"]))


def _status(guarantee: str) -> GuaranteeStatus:
    """Returns the status that the sentence of a card names."""
    known: tuple[GuaranteeStatus, ...] = get_args(GuaranteeStatus)
    return next((status for status in known if f": {status} (" in guarantee), "none")


def train_on(
    released: ReleasedTexts, directory: Path, display: Display, options: TrainingOptions = TRAINING
) -> TrainedEnsemble:
    """Trains one model on the texts, in ``directory``. A finished model of the same texts is kept.

    Raises:
        InputError, WorkError: see `train`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    texts = [text for text in released.texts if text.strip()]
    write_lines(directory / _CORPUS, ({"user": str(number), "text": text} for number, text in enumerate(texts)))
    run_training(plan(Corpus(directory / _CORPUS), directory / _MODEL, parts=1, options=options), display=display)
    return TrainedEnsemble.load(directory / _MODEL)


def score(trained: Sequence[TrainedEnsemble], canaries: Sequence[Canary]) -> list[Reals]:
    """Returns, for each trained model, what it adds to the mean log-probability of each canary's secret, [canaries]."""
    adapters = [one.files(one.manifest.parts[0]) for one in trained]
    found = read_outputs(resolve(), adapters, [(canary.prompt, canary.secret) for canary in canaries], 1)
    logs = [output.of_wanted.double().numpy() for output in found]  # of the public model first
    return list(np.array([(each[1:] - each[:1]).mean(axis=1) for each in logs]).T)


def audit(
    released: ReleasedTexts, canaries: Sequence[Canary], scores: Reals, confidence: float, guesses: int
) -> Finding:
    """Guesses the coins from the scores, and compares the bound with the claim of the texts' card."""
    included = np.array([canary.included for canary in canaries])
    correct = correct_guesses(included, scores, guesses)

    def bound(level: float) -> float:
        return one_run_epsilon(len(canaries), guesses, correct, released.delta, level)

    return Finding(
        attack="one-run audit of released text",
        subject=released.name,
        status=released.status,
        adjacency="user",
        claim=released.epsilon,
        delta=released.delta,
        lower=bound(confidence),
        confidence=confidence,
        certain=bound(CERTAIN),
        details={
            "planted": len(canaries),
            "guesses": guesses,
            "correct": correct,
            "area": area(scores[included], scores[~included]),
        },
    )
