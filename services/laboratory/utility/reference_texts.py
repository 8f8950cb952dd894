"""Writes labelled text by a published mechanism from references in prompts, as a directory for `evaluate task`.

The prompt of a reference shows its text and asks for another of the same label; the public prompt names the label only.
Labels are public: how many texts each has is given by its batches. Draws come from a seeded generator, because the
texts are for comparison and not for publication.
"""

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.errors import InputError
from services.files import write_atomically, write_lines
from services.generation.card import JSON_FILE as CARD
from services.generation.job import JOB, OUTPUT
from services.laboratory.utility.labelled import Labelled
from services.laboratory.utility.references import Amin, InvisibleInk

INVISIBLE_INK, AMIN = "invisible-ink", "amin"
METHODS = (INVISIBLE_INK, AMIN)

_LONGEST_REFERENCE = 160  # tokens
_END = "\n\n"


@dataclass(frozen=True)
class ReferenceOptions:
    """Holds the options of a reference.

    Attributes:
        method: one of `METHODS`.
        references: B, the number of users whose references write one text.
        tokens: the largest number of tokens of a text; for Amin et al., of its private tokens.
        seed: of the batches and of all draws.
        sigma: the scale of the noise of Amin et al.'s sparse vector technique.
    """

    method: str
    epsilon: float
    delta: float = 1e-5
    references: int = 16
    tokens: int = 64
    seed: int = 0
    sigma: float = 0.2

    def mechanism(self, text: int) -> InvisibleInk | Amin:
        """Returns the mechanism for a text. Each has its own batch of users and so the whole budget."""
        if self.method == INVISIBLE_INK:
            return InvisibleInk.plan(self.references, self.tokens, self.epsilon, self.delta)
        seed = self.seed * 1_000_003 + text
        return Amin.plan(self.references, self.tokens, self.epsilon, self.delta, sigma=self.sigma, seed=seed)


@dataclass(frozen=True)
class ReferenceBatch:
    """Holds one reference of each of B users, all with one label."""

    label: str
    texts: tuple[str, ...]


def batches(real: Labelled, references: int, seed: int) -> list[ReferenceBatch]:
    """Divides users into batches of one label, each user in at most one batch, with one text.

    Raises:
        InputError: no label has enough users.
    """
    order = torch.randperm(len(real), generator=torch.Generator().manual_seed(seed)).tolist()
    waiting: dict[str, list[str]] = {label: [] for label in sorted(real.classes)}
    taken: set[str] = set()
    for index in order:
        if real.users[index] not in taken:
            taken.add(real.users[index])
            waiting[real.labels[index]].append(real.texts[index])
    found = [
        ReferenceBatch(label, tuple(texts[start : start + references]))
        for label, texts in waiting.items()
        for start in range(0, len(texts) - references + 1, references)
    ]
    if not found:
        raise InputError(f"references: no label has {references} users; use fewer references")
    return found


def write_texts(
    real: Labelled,
    label_field: str,
    output: Path,
    model: Path,
    options: ReferenceOptions,
    progress: Callable[[float], None] = lambda done: None,
) -> int:
    """Writes a text for each batch and a card that states the budget; returns the number of texts.

    Raises:
        InputError: the budget does not last, or there are too few users.
    """
    found = batches(real, options.references, options.seed)
    options.mechanism(0)  # refuses a budget that does not last before the model is loaded
    writer = _Writer(model, options.seed)
    rows, tokens = [], 0
    for index, batch in enumerate(found):
        text, count = writer.write(batch, label_field, options.mechanism(index), options.tokens)
        rows.append({"id": index, label_field: batch.label, "text": text, "tokens": count})
        tokens += count
        progress((index + 1) / len(found))
    output.mkdir(parents=True, exist_ok=True)
    write_lines(output / OUTPUT, rows)
    write_atomically(output / JOB, json.dumps({"reference": options.method}).encode())
    write_atomically(output / CARD, json.dumps(_card(options, tokens), indent=2).encode())
    return len(rows)


def _card(options: ReferenceOptions, tokens: int) -> dict[str, Any]:
    return {
        "protocol": {"kind": options.method, "references": options.references},
        "epsilon": options.epsilon,
        "delta": options.delta,
        "budget": {"tokens_delivered": tokens},
    }


class _Writer:
    """Decodes texts from a batch of prompts with one cache, the public prompt first."""

    def __init__(self, model: Path, seed: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # slow to import

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._generator = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def write(self, batch: ReferenceBatch, field: str, mechanism: InvisibleInk | Amin, most: int) -> tuple[str, int]:
        """Returns a text and its number of tokens. A text of Amin et al. ends after `most` private tokens."""
        limit = most if isinstance(mechanism, InvisibleInk) else 4 * most
        tokens: list[int] = []
        logits = self._logits(self._prompts(batch, field))
        rows = next(logits)
        while len(tokens) < limit and not (isinstance(mechanism, Amin) and mechanism.ended):
            chances = mechanism.next_token(rows[0].double(), rows[1:].double())
            token = int(torch.multinomial(chances, 1, generator=self._generator))
            if token == self._tokenizer.eos_token_id:
                break
            tokens.append(token)
            if _END in self._tokenizer.decode(tokens):
                break
            rows = logits.send(token)
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text.partition(_END)[0].strip(), len(tokens)

    def _prompts(self, batch: ReferenceBatch, field: str) -> list[list[int]]:
        asked = f"{field}: {batch.label}\ntext:"
        eos = self._tokenizer.eos_token_id
        prompts = [[eos, *self._tokens(asked)]]
        for text in batch.texts:
            shown = self._tokens(f"{asked} ") + self._tokens(text)[:_LONGEST_REFERENCE]
            prompts.append([eos, *shown, *self._tokens(f"{_END}{asked}")])
        return prompts

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return tokens

    def _logits(self, prompts: Sequence[Sequence[int]]) -> Generator[Tensor, int, None]:
        """Yields the logits [1 + B, V] after the prompts, and after each token that is sent."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts])
        mask = torch.tensor([[*[0] * (longest - len(prompt)), *[1] * len(prompt)] for prompt in prompts])
        cache = None
        while True:
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            answer = self._network(
                input_ids=ids,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = answer.past_key_values
            token = yield answer.logits[:, -1]
            ids = torch.full((len(prompts), 1), token)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
