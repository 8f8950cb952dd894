"""Continues a job's prompts with the public model alone, as the baseline for the private text.

It reads no private text, so nothing is charged. It appends texts in batches and keeps existing texts.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import load_lines
from privmix.generation.client import Sampling
from privmix.generation.job import JobRequest
from privmix.generation.template import Item
from privmix.training.manifest import private_base
from privmix.training.private_base import resolve_public
from privmix.training.public_model import resolve, revision

FILE = "baseline.jsonl"
_BATCH = 8


def baseline_model(named: str | None, base_model: str | None) -> Path:
    """Returns the directory of the public model to compare with: below a private base, the default one.

    Args:
        named: the public model that was asked for, as `resolve` takes it; None for the ensemble's.
        base_model: the ensemble's base model, which may be a private base; None if it is not known.

    Raises:
        InputError: the named model was trained on private text, or the base was not made from the default one.
        PublicModelError: as `resolve`.
    """
    if named is None and base_model is not None:
        private = private_base(resolve(base_model))
        if private is not None and revision(default := resolve()) == private.origin:
            return default
    return resolve_public(named or base_model)


def write_baseline(directory: Path, request: JobRequest, model: Path, progress: Callable[[int], None]) -> None:
    """Appends the missing texts to `directory`/baseline.jsonl.

    Args:
        model: the public model's directory.
        progress: called with the number of finished texts.

    Raises:
        InputError: the file is damaged.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # slow to import

    path = directory / FILE
    finished = _finished(path)
    waiting = [item for item in request.items if item.index not in finished]
    progress(len(finished))
    if not waiting:
        return
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    with path.open("a", encoding="utf-8") as file:
        for first in range(0, len(waiting), _BATCH):
            batch = waiting[first : first + _BATCH]
            for record in _continue(batch, request.sampling, network, tokenizer):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            progress(len(finished) + first + len(batch))


def load_baseline(directory: Path) -> list[dict[str, Any]] | None:
    """Returns the public model's texts; None if the file does not exist."""
    path = directory / FILE
    if not path.exists():
        return None
    return load_lines(path)


@torch.inference_mode()
def _continue(batch: Sequence[Item], sampling: Sampling, network: Any, tokenizer: Any) -> list[dict[str, Any]]:
    inputs = tokenizer([item.prompt for item in batch], return_tensors="pt", padding=True, split_special_tokens=True)
    answers = network.generate(
        **inputs,
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=0,
        max_new_tokens=sampling.max_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )[:, inputs["input_ids"].shape[1] :]
    return [_record(item, answer, sampling, tokenizer) for item, answer in zip(batch, answers.tolist(), strict=True)]


def _record(item: Item, answer: list[int], sampling: Sampling, tokenizer: Any) -> dict[str, Any]:
    ended = tokenizer.eos_token_id in answer
    if ended:
        answer = answer[: answer.index(tokenizer.eos_token_id)]
    text: str = tokenizer.decode(answer, skip_special_tokens=True)
    stops = [position for stop in sampling.stop if (position := text.find(stop)) >= 0]
    stopped = ended or bool(stops)
    text = text[: min(stops, default=len(text))]
    return {
        "id": item.index,
        **item.fields,
        "text": text,
        "tokens": len(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]),
        "finish_reason": "stop" if stopped else "length",
    }


def _finished(path: Path) -> set[int]:
    """Returns the ids of the finished items, after removing an incomplete last line."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    path.write_bytes(complete)
    try:
        return {json.loads(line)["id"] for line in complete.splitlines()}
    except (ValueError, KeyError) as error:
        raise InputError(f"{path}: is damaged; remove it") from error
