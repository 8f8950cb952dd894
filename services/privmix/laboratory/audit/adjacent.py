"""Writes two corpora that differ in one user's text, in the worst case for the claim, and trains an ensemble on each.

An audit over HTTP compares services of the two ensembles (`black_box`): the claim bounds how well anyone can
distinguish them. The attacked user repeats one word after a prompt; all other users repeat another word. Without the
attacked user, the user's part has the text of one other user.
"""

import json
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from privmix.foundation.files import write_atomically
from privmix.foundation.json_lines import write_lines
from privmix.foundation.progress import Display
from privmix.laboratory.audit.sizes import AdjacentSize
from privmix.laboratory.audit.testbed import SALT, claim_directory
from privmix.training.corpus import Corpus
from privmix.training.options import TrainingOptions
from privmix.training.partition import part_of, read_salt
from privmix.training.plan import run_training
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


def plant(directory: Path, size: AdjacentSize, display: Display | None = None) -> DistinguishingPrompt:
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
    for each in plans:
        run_training(each, display=display)
    return question


@torch.inference_mode()
def _question(path: Path, tokenizer: PreTrainedTokenizerBase) -> DistinguishingPrompt:
    """Chooses the prompt whose second most likely token has the share closest to `_WANTED_SHARE` of the first two."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found: list[tuple[float, DistinguishingPrompt]] = []
    for prompt in _PROMPTS:
        prefix = tokenizer(prompt)["input_ids"]
        row = model(torch.tensor([prefix])).logits[0, -1]
        usual, planted = row.topk(2).indices.tolist()
        words = [tokenizer.decode([token]) for token in (planted, usual)]
        if [tokenizer(prompt + word)["input_ids"] for word in words] == [[*prefix, planted], [*prefix, usual]]:
            distance = abs(float(torch.sigmoid(row[planted] - row[usual])) - _WANTED_SHARE)
            found.append((distance, DistinguishingPrompt(prompt, *words)))
    if not found:
        raise RuntimeError("the tokenizer merges every prompt of the audit with the words that follow it")
    return min(found, key=lambda each: each[0])[1]


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


def _corpus(directory: Path, world: str) -> Path:
    return directory / f"{world}.jsonl"
