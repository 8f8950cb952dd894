"""Chooses settings on private held-out users with the exponential mechanism, at a price that a ledger counts.

    choose(tuning, Corpus(Path("held_out.jsonl")), epsilon=0.5, ledger="choice.db")

The candidates are the certified choices on the front of a tuning, without those on private bases; its text and
ensembles are public. A user's loss under a candidate is 1/2 - g/2, clipped to [0, 1], if the candidate gains g nats per
token over the public model on that user's first tokens. Every user is scored alone, so one user moves each sum of
losses by at most 1, and the choice is differentially private for a user's text replaced by any other
(`privmix.privacy.sampling.selection`). Only the choice is released: no loss is stored or shown.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from uuid import uuid4

import numpy as np
import ray
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from privmix.budget.ledger import charge_release
from privmix.foundation.errors import InputError
from privmix.foundation.fan_out import run_as_ray_tasks
from privmix.foundation.files import write_atomically
from privmix.foundation.progress import Display
from privmix.foundation.ray_session import connected
from privmix.laboratory.evaluation import tasks
from privmix.laboratory.evaluation.cases import CandidateSettings
from privmix.laboratory.evaluation.ensembles import TrainedEnsemble
from privmix.laboratory.evaluation.text import texts_of_users
from privmix.laboratory.evaluation.tuning import CONTEXT, Tuning, TuningResult
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.sampling.selection import SelectionEvent, rate, select
from privmix.privacy.settings import Settings
from privmix.training import public_model
from privmix.training.corpus import Corpus

FILE = "private-choice.json"
DELTA = 1e-5
"""The delta of a ledger that the choice creates. The choice itself has delta 0."""

_USERS_AT_ONCE = 16


class PrivateChoice(BaseModel):
    """Holds a choice, which may be published, and its cost.

    Attributes:
        label, ensemble, parts, protocol, parameters: those of the chosen `TuningResult`.
        candidates: the labels of all candidates.
        users: the number of held-out users, which counts as public.
        epsilon: the cost, with delta 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    ensemble: Path
    parts: int
    protocol: str
    parameters: dict[str, float | int | str | bool | None]
    candidates: tuple[str, ...]
    users: int
    epsilon: float


def choose(
    tuning: Tuning,
    users: Corpus,
    output: Path,
    *,
    epsilon: float,
    ledger: str,
    budget: float | None = None,
    display: Callable[[], Display] = Display,
) -> PrivateChoice:
    """Chooses among the front of a tuning, and charges the ledger once. A choice in `output` is not paid for again.

    Args:
        users: texts of private users that no ensemble of the tuning contains.
        ledger: a SQLite file or a URL.
        budget: the epsilon of a new ledger, for all choices on these users; by default that of this choice.

    Raises:
        InputError: there is nothing to choose from, or epsilon is too small.
        WorkError: a task failed, or the ledger's budget does not suffice. Nothing was chosen.
    """
    candidates = sorted(
        (
            choice
            for choice in tuning.choices
            if choice.on_front and choice.status == "certified" and choice.base is None
        ),
        key=lambda choice: str(choice.ensemble),
    )
    names = tuple(f"{choice.label}, {choice.parts} parts" for choice in candidates)
    earlier = _earlier(output / FILE)
    if earlier is not None and (earlier.candidates, earlier.epsilon) == (names, epsilon):
        return earlier
    event = SelectionEvent(epsilon, "user", "replace", 1, uuid4().hex)
    _check(candidates, event)
    with display() as shown:
        totals, count = _total_losses(tuning, candidates, users, shown)
    charge_release(ledger, event, f"settings chosen on {users.name}", budget or epsilon, DELTA)
    best = candidates[select(totals, event)]
    chosen = PrivateChoice(
        label=best.label,
        ensemble=best.ensemble,
        parts=best.parts,
        protocol=best.protocol,
        parameters=dict(best.parameters),
        candidates=names,
        users=count,
        epsilon=epsilon,
    )
    write_atomically(output / FILE, chosen.model_dump_json(indent=2).encode() + b"\n")
    return chosen


def _earlier(path: Path) -> PrivateChoice | None:
    try:
        return PrivateChoice.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _check(candidates: Sequence[TuningResult], event: SelectionEvent) -> None:
    if len(candidates) < 2:
        raise InputError("private: the public tuning leaves one candidate, so there is nothing to choose or to pay")
    try:
        rate(event, len(candidates))
    except ValueError as error:
        raise InputError(f"private-epsilon: {error}") from error


def _total_losses(
    tuning: Tuning, candidates: Sequence[TuningResult], users: Corpus, display: Display
) -> tuple[NDArray[np.int64], int]:
    """Returns the sum of the users' losses under each candidate, in `LOSS_UNITS`, and the number of users."""
    from transformers import AutoTokenizer

    ensembles = [
        TrainedEnsemble.load(directory) for directory, _ in groupby(candidates, lambda choice: choice.ensemble)
    ]
    base = public_model.resolve(ensembles[0].manifest.base_model)
    grouped = [
        CandidateSettings(
            [ensemble.files(part) for part in ensemble.manifest.parts],
            [_planned(choice, tuning) for choice in candidates if choice.ensemble == ensemble.directory],
        )
        for ensemble in ensembles
    ]
    texts = texts_of_users(users, AutoTokenizer.from_pretrained(base), context=CONTEXT, tokens=CONTEXT)
    display.say(f"scoring {len(candidates)} candidates on {len(texts)} users")
    with connected():
        shared = ray.put(grouped)
        jobs = {
            f"users {first + 1} to {min(first + _USERS_AT_ONCE, len(texts))}": (
                base,
                shared,
                texts[first : first + _USERS_AT_ONCE],
            )
            for first in range(0, len(texts), _USERS_AT_ONCE)
        }
        losses = [result for _, result in run_as_ray_tasks(tasks.losses_of_users, jobs, display, gpus=True)]
    return np.concatenate(losses).sum(axis=0), len(texts)


def _planned(choice: TuningResult, tuning: Tuning) -> tuple[Settings, Protocol]:
    settings = PROTOCOLS[choice.protocol].model_validate({**choice.parameters, **tuning.budget.limits()})
    return settings, settings.plan(choice.parts)
