"""Two corpora that differ in one user's text, in the worst case for the claim, and an ensemble trained on each.

An audit over HTTP compares a service of one with a service of the other (`attacks.black_box`): the promise is that
nobody tells them apart by more than the claim. One user says a word after a prompt, over and over; all other users say
another word. Without the user's text, the user's part has the text of its one other user.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from services.audit.worlds.testbed import SALT, begun_with
from services.engine.engine import PUBLIC, EngineSettings, Request, create
from services.evaluation.ensembles import Ensemble
from services.files import write_atomically, write_lines
from services.progress import Display
from services.training.corpus import Corpus
from services.training.options import Resources, TrainingOptions
from services.training.partition import part_of, read_salt
from services.training.plan import carry_out
from services.training.public_model import resolve
from services.training.train import plan

WITH, WITHOUT, QUESTION = "with", "without", "question.json"
_PROMPTS = tuple(
    f"{first} {second}"
    for first in ("The", "My", "In the end", "Once", "He said", "We are", "This is", "There was", "Please")
    for second in ("very", "one of", "to", "a", "not", "and")
)
# The share of two tokens that the planted one should have under p0: at a radius c the worst case is 1 / (e^c + 1).
_WANTED_SHARE = 0.28


@dataclass(frozen=True)
class Size:
    """How much is planted.

    Attributes:
        parts: N, of both ensembles.
        repetitions: how often the user in question says the planted word; everybody else speaks less.
    """

    parts: int = 3
    repetitions: int = 128


@dataclass(frozen=True)
class Question:
    """What both services are asked.

    Attributes:
        prompt: after which one token is asked for, from the two that are likeliest under the public model.
        planted, usual: what the user in question says then, and what everybody else says.
    """

    prompt: str
    planted: str
    usual: str


@dataclass(frozen=True)
class Adjacent:
    """What was planted, and how well it was learnt.

    Attributes:
        question: for both services.
        public: the planted word's share of the two, by the public model.
        shares: the same by each part, for either world.
    """

    question: Question
    public: float
    shares: Mapping[str, tuple[float, ...]]


def plant(directory: Path, size: Size, display: Display | None = None) -> Adjacent:
    """Write both corpora into ``directory`` and train an ensemble on each; what is there already is kept.

    Raises:
        InputError: the directory was begun with another size; and as `train`.
        TrainingError: as `train`.
    """
    begun_with(directory, size)
    transformers_logging.disable_progress_bar()
    model = resolve()
    tokenizer = AutoTokenizer.from_pretrained(model)
    if not (directory / QUESTION).exists():
        question = _question(model, tokenizer)
        _write_corpora(directory, size, question)
        write_atomically(directory / QUESTION, json.dumps(asdict(question)).encode())
    question = Question(**json.loads((directory / QUESTION).read_text()))
    block = len(tokenizer(question.prompt)["input_ids"]) + 2  # one document: prompt, word, end of sequence
    options = TrainingOptions(block=block, batch=4, epochs=4, learning_rate=2e-3)
    plans = [
        plan(
            Corpus(_corpus(directory, world)),
            directory / world,
            parts=size.parts,
            options=options,
            salt_file=directory / SALT,
        )
        for world in (WITH, WITHOUT)
    ]
    carry_out(plans, Resources(), display or Display())
    return _asked(directory, model, tokenizer, question)


def _question(model: Path, tokenizer: PreTrainedTokenizerBase) -> Question:
    """The prompt after which the second likeliest token has nearly the wanted share of the first two."""
    best: tuple[float, Question] | None = None
    for prompt, row in zip(_PROMPTS, _rows(model, {}, tokenizer, _PROMPTS), strict=True):
        usual, planted = row.topk(2).indices.tolist()
        words = [tokenizer.decode([token]) for token in (planted, usual)]
        before = tokenizer(prompt)["input_ids"]
        together = [tokenizer(prompt + word)["input_ids"] for word in words]
        if together != [[*before, planted], [*before, usual]]:
            continue  # the text is tokenized in another way
        distance = abs(float(torch.sigmoid(row[planted] - row[usual])) - _WANTED_SHARE)
        if best is None or distance < best[0]:
            best = distance, Question(prompt, *words)
    if best is None:
        raise RuntimeError("no prompt of the audit is tokenized as its parts are")
    return best[1]


def _write_corpora(directory: Path, size: Size, question: Question) -> None:
    """The last part's users are the one in question and another, who speaks little; every other part has one user."""
    salt = read_salt(directory / SALT)

    def member(name: str, part: int) -> str:
        return next(user for index in count() if part_of(user := f"{name}-{index}", salt, size.parts) == part)

    last = size.parts - 1
    usual, planted = ({"text": question.prompt + word} for word in (question.usual, question.planted))
    spoken = {member("user", part): max(1, size.repetitions // 2) for part in range(last)}
    spoken[member("user", last)] = max(1, size.repetitions // 8)
    others = [{"user": user, **usual} for user, times in spoken.items() for _ in range(times)]
    write_lines(_corpus(directory, WITHOUT), others)
    own = [{"user": member("in-question", last), **planted}] * size.repetitions
    write_lines(_corpus(directory, WITH), [*others, *own])


def _asked(directory: Path, model: Path, tokenizer: PreTrainedTokenizerBase, question: Question) -> Adjacent:
    adapters: dict[str, Path] = {}
    for world in (WITH, WITHOUT):
        ensemble = Ensemble.load(directory / world)
        adapters |= {f"{world}/{part.name}": ensemble.files(part).path for part in ensemble.manifest.parts}
    rows = _rows(model, adapters, tokenizer, [question.prompt])
    planted, usual = (tokenizer(question.prompt + word)["input_ids"][-1] for word in (question.planted, question.usual))
    public, *shares = torch.sigmoid(rows[:, planted] - rows[:, usual]).tolist()
    named = dict(zip(adapters, shares, strict=True))
    by_world = {
        world: tuple(share for name, share in named.items() if name.startswith(f"{world}/"))
        for world in (WITH, WITHOUT)
    }
    return Adjacent(question, public, by_world)


def _rows(
    model: Path, adapters: Mapping[str, Path], tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]
) -> torch.Tensor:
    """float32 [prompts * (1 + adapters), V]: log-probabilities of the public model and of every adapter."""
    engine = create(EngineSettings(model, "transformers", "float32", 64, adapters=adapters))
    names = (PUBLIC, *adapters)
    return engine.next_token([Request(text, tuple(tokenizer(text)["input_ids"]), names) for text in prompts])


def _corpus(directory: Path, world: str) -> Path:
    return directory / f"{world}.jsonl"
