"""Writes two corpora that differ in one user's text, in the worst case for the claim, and trains an ensemble on each.

An audit over HTTP compares services of the two ensembles (`black_box`): the claim bounds how well anyone can
distinguish them. The attacked user repeats one word after a prompt; all other users repeat another word. Without the
attacked user, the user's part has the text of one other user.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from privmix.engine.engine import PUBLIC, EngineSettings, Request, create
from privmix.foundation.files import write_atomically
from privmix.foundation.json_lines import write_lines
from privmix.foundation.progress import Display
from privmix.laboratory.audit.sizes import AdjacentSize
from privmix.laboratory.audit.testbed import SALT, claim_directory
from privmix.laboratory.evaluation.ensembles import TrainedEnsemble
from privmix.training.corpus import Corpus
from privmix.training.options import Resources, TrainingOptions
from privmix.training.partition import part_of, read_salt
from privmix.training.plan import run_trainings
from privmix.training.public_model import resolve
from privmix.training.train import plan

WITH, WITHOUT, QUESTION = "with", "without", "question.json"
_PROMPTS = tuple(
    f"{first} {second}"
    for first in ("The", "My", "In the end", "Once", "He said", "We are", "This is", "There was", "Please")
    for second in ("very", "one of", "to", "a", "not", "and")
)
# The desired share of the planted token among the two tokens under p0. At radius c, the worst case is 1 / (e^c + 1).
_WANTED_SHARE = 0.28


@dataclass(frozen=True)
class DistinguishingPrompt:
    """The request to both services.

    Attributes:
        prompt: the prompt. The answer is one of the two most likely tokens under the public model.
        planted: the word of the attacked user after the prompt.
        usual: the word of all other users after the prompt.
    """

    prompt: str
    planted: str
    usual: str


@dataclass(frozen=True)
class Adjacent:
    """The planted request, and the models' answers to it.

    Attributes:
        question: the request to both services.
        public: the planted word's share of the two words' probability under the public model.
        shares: the same share under each part's model, for either world.
    """

    question: DistinguishingPrompt
    public: float
    shares: Mapping[str, tuple[float, ...]]


def plant(directory: Path, size: AdjacentSize, display: Display | None = None) -> Adjacent:
    """Writes both corpora into ``directory`` and trains an ensemble on each. Keeps existing files.

    Raises:
        InputError: the directory has files of another size; and as `train`.
        TrainingError: as `train`.
    """
    claim_directory(directory, size)
    transformers_logging.disable_progress_bar()
    model = resolve()
    tokenizer = AutoTokenizer.from_pretrained(model)
    if not (directory / QUESTION).exists():
        question = _question(model, tokenizer)
        _write_corpora(directory, size, question)
        write_atomically(directory / QUESTION, json.dumps(asdict(question)).encode())
    question = DistinguishingPrompt(**json.loads((directory / QUESTION).read_text()))
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
    run_trainings(plans, Resources(), display or Display())
    return _measured(directory, model, tokenizer, question)


def _question(model: Path, tokenizer: PreTrainedTokenizerBase) -> DistinguishingPrompt:
    """Chooses the prompt whose second most likely token has the share closest to `_WANTED_SHARE` of the first two."""
    best: tuple[float, DistinguishingPrompt] | None = None
    for prompt, row in zip(_PROMPTS, _rows(model, {}, tokenizer, _PROMPTS), strict=True):
        usual, planted = row.topk(2).indices.tolist()
        words = [tokenizer.decode([token]) for token in (planted, usual)]
        prefix = tokenizer(prompt)["input_ids"]
        sequences = [tokenizer(prompt + word)["input_ids"] for word in words]
        if sequences != [[*prefix, planted], [*prefix, usual]]:
            continue  # the tokenizer merges the prompt and the word
        distance = abs(float(torch.sigmoid(row[planted] - row[usual])) - _WANTED_SHARE)
        if best is None or distance < best[0]:
            best = distance, DistinguishingPrompt(prompt, *words)
    if best is None:
        raise RuntimeError("the tokenizer merges every prompt of the audit with the words that follow it")
    return best[1]


def _write_corpora(directory: Path, size: AdjacentSize, question: DistinguishingPrompt) -> None:
    """Writes both corpora. The last part has the attacked user and a quiet one; every other part has one user."""
    salt = read_salt(directory / SALT)

    def member(name: str, part: int) -> str:
        return next(user for index in count() if part_of(user := f"{name}-{index}", salt, size.parts) == part)

    last = size.parts - 1
    usual, planted = ({"text": question.prompt + word} for word in (question.usual, question.planted))
    repetitions = {member("user", part): max(1, size.repetitions // 2) for part in range(last)}
    repetitions[member("user", last)] = max(1, size.repetitions // 8)
    others = [{"user": user, **usual} for user, times in repetitions.items() for _ in range(times)]
    write_lines(_corpus(directory, WITHOUT), others, private=True)
    own = [{"user": member("in-question", last), **planted}] * size.repetitions
    write_lines(_corpus(directory, WITH), [*others, *own], private=True)


def _measured(
    directory: Path, model: Path, tokenizer: PreTrainedTokenizerBase, question: DistinguishingPrompt
) -> Adjacent:
    adapters: dict[str, Path] = {}
    for world in (WITH, WITHOUT):
        ensemble = TrainedEnsemble.load(directory / world)
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
    """Returns log-probabilities of the public model and of every adapter, float32 [prompts * (1 + adapters), V]."""
    engine = create(EngineSettings(model, "transformers", "float32", 64, adapters=adapters))
    names = (PUBLIC, *adapters)
    return engine.next_token([Request(text, tuple(tokenizer(text)["input_ids"]), names) for text in prompts])


def _corpus(directory: Path, world: str) -> Path:
    return directory / f"{world}.jsonl"
