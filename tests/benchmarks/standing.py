"""Holds users out of public text, and plans protocols for many parts of which the rows of few stand for all."""

import hmac
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from privmix.engine.engine import AdapterFiles
from privmix.foundation.json_lines import write_lines
from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.rows import EnsembleRows, RowReader, is_whole
from privmix.laboratory.evaluation.tasks import score_adapters, score_base
from privmix.laboratory.evaluation.text import EvaluationText
from privmix.privacy.events import Event
from privmix.privacy.protocol import Protocol, Release
from privmix.privacy.protocols.exponential import Exponential, ExponentialSettings
from privmix.privacy.protocols.individual import Individual, IndividualSettings
from privmix.privacy.settings import Settings
from privmix.training.corpus import Corpus

HELD_OUT = 0.1
"""The fraction of the users that is held out."""


def held_apart(corpus: Corpus, folder: Path, user_limit: int | None = None) -> tuple[Corpus, Corpus]:
    """Returns the text to train on and that of held-out users, which are the same ones every time: the text is public.

    Args:
        folder: where both are written.
        user_limit: the number of characters to keep of each user to train on.

    """
    train, held_out = folder / "train.jsonl", folder / "heldout.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    sides: dict[bool, list[dict[str, str]]] = {True: [], False: []}
    for document in corpus:
        digest = hmac.digest(bytes(32), b"privmix held out\0" + document.user.encode(), "sha256")
        apart = int.from_bytes(digest[:8], "big") < int(HELD_OUT * 2**64)
        sides[apart].append({"user": document.user, "text": document.text})
    if user_limit is not None:
        left: Counter[str] = Counter()
        for row in sides[False]:
            row["text"] = row["text"][: user_limit - left[row["user"]]]
            left[row["user"]] += len(row["text"])
    write_lines(held_out, sides[True])
    write_lines(train, (row for row in sides[False] if row["text"].strip()))
    return Corpus(train), Corpus(held_out)


Planned = tuple[Settings, Protocol]

TOKENS = (1024, 16_384, 131_072)
"""The numbers of tokens that compared budgets last for."""
LEAST_PARTS, LEAST_TOKENS = 64, 1024
"""The number of parts and the horizon with which individual budgets are measured at a radius, at least."""
_ROUNDS = 4


@dataclass(frozen=True)
class FewRows(Individual):
    """Answers with the rows of `standing` parts, of which each stands for an equal share of all parts."""

    standing: int

    @property
    def models(self) -> int:
        return self.standing

    def combine(self, public: Tensor, sums: Tensor, charges: Tensor | None = None) -> Release:
        return super().combine(public, sums * (self.parts / self.standing), charges)

    @classmethod
    def at(cls, radius: float, standing: int) -> Planned:
        """Plans the default budget for a radius: more parts the larger it is, or more tokens the smaller it is."""
        tokens, size = LEAST_TOKENS, IndividualSettings().plan(LEAST_PARTS).size
        for _ in range(_ROUNDS):  # the account grows a little with the horizon
            tokens = max(LEAST_TOKENS, round(size * (LEAST_PARTS / radius) ** 2))
            size = IndividualSettings(tokens=tokens).plan(LEAST_PARTS).size
        return few_individual(IndividualSettings(tokens=tokens), round(radius * math.sqrt(tokens / size)), standing)


def few_individual(settings: IndividualSettings, parts: int, standing: int) -> Planned:
    """Plans individual budgets, whose settings may be on a private base."""
    return settings, FewRows(**asdict(settings.plan(parts)), standing=standing)


def few_exponential(epsilon: float, tokens: int, parts: int, standing: int, base: Event | None = None) -> Planned:
    """Plans the exponential mechanism with all parts drawn, and nothing that ends it.

    The mean of rows that stand for equal shares is the mean of all; the radius is that of all parts.
    """
    radius = ExponentialSettings(epsilon=epsilon, tokens=tokens, sample=parts).on_base(base).plan(parts).radius
    return ExponentialSettings(epsilon=None, tokens=tokens, radius=radius), Exponential(standing, standing, radius)


def rounded(estimate: Estimate) -> list[float | None]:
    """Returns the mean and the ends of its 95 % interval."""
    return [None if value is None else round(value, 4) for value in (estimate.mean, estimate.low, estimate.high)]


def kept_states(model: Path, text: EvaluationText, output: Path, name: str) -> tuple[Path, Path]:
    """Returns the files of a model's output layer and hidden states, which are computed unless they are there."""
    head, states = output / f"{name}.head", output / f"{name}.npy"
    if not (head.exists() and is_whole(states, text.positions)):
        score_base(model, text, "auto", states, head)
    return head, states


def kept_rows(
    model: Path,
    text: EvaluationText,
    states: tuple[Path, Path],
    parts: Sequence[tuple[AdapterFiles, Path]],
    original: tuple[Path, Path] | None = None,
) -> RowReader:
    """Computes the rows of parts that are missing, and opens all.

    Args:
        states: of the model (`kept_states`).
        parts: each with the file of its hidden states.
        original: the states of the public model, if the model is a private base.
    """
    if missing := [pair for pair in parts if not is_whole(pair[1], text.positions)]:
        score_adapters(model, text, "auto", [files for files, _ in missing], [path for _, path in missing])
    return RowReader.open(EnsembleRows(*states, tuple(path for _, path in parts), original=original))
