"""Writes labelled text by a published mechanism from references in prompts, as a directory for `evaluate task`.

The prompt of a reference shows its text and asks for another of the same label; the public prompt names the label only.
Labels are public: how many texts each has is given by its batches. Draws come from a seeded generator, because the
texts are for comparison and not for publication.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from services.errors import InputError
from services.files import write_atomically, write_lines
from services.generation.card import JSON_FILE as CARD
from services.generation.job import JOB, OUTPUT
from services.laboratory.utility.labelled import Labelled
from services.laboratory.utility.references import Amin, InvisibleInk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INVISIBLE_INK, AMIN = "invisible-ink", "amin"
METHODS = (INVISIBLE_INK, AMIN)

_LONGEST_REFERENCE = 160  # tokens
_END = "\n\n"
_TOKENS_BY_PRIVATE = 4  # at most, of the texts of a batch


@dataclass(frozen=True)
class ReferenceOptions:
    """Holds the options of a reference.

    Attributes:
        method: one of `METHODS`.
        references: B, the number of users of a batch, each with one reference.
        tokens: the largest number of tokens of a text; for Amin et al., of the private tokens of a batch.
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

    def mechanism(self, batch: int) -> InvisibleInk | Amin:
        """Returns the mechanism for a batch. Each has its own users and so the whole budget."""
        if self.method == INVISIBLE_INK:
            return InvisibleInk.plan(self.references, self.tokens, self.epsilon, self.delta)
        seed = self.seed * 1_000_003 + batch
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
    """Writes the texts of each batch and a card that states the budget; returns the number of texts.

    Raises:
        InputError: the budget does not last, or there are too few users.
    """
    found = batches(real, options.references, options.seed)
    options.mechanism(0)  # refuses a budget that does not last before the model is loaded
    writer = _Writer(model, options.seed)
    rows: list[dict[str, Any]] = []
    tokens = 0
    for index, batch in enumerate(found):
        for text, count in writer.texts(batch, label_field, options.mechanism(index), options.tokens):
            rows.append({"id": len(rows), label_field: batch.label, "text": text, "tokens": count})
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
    """Decodes the texts of a batch, the public prompt first."""

    def __init__(self, model: Path, seed: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # slow to import

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
        self._generator = torch.Generator().manual_seed(seed)

    def texts(
        self, batch: ReferenceBatch, field: str, mechanism: InvisibleInk | Amin, most: int
    ) -> Iterator[tuple[str, int]]:
        """Yields each text of a batch and its number of tokens.

        A batch of InvisibleInk writes one text. One of Amin et al. writes texts until its `most` private tokens are
        spent, or until it has written `_TOKENS_BY_PRIVATE` times as many tokens: public ones have no end of their own.
        """
        rows = _Rows(self._network, self._prompts(batch, field))
        if isinstance(mechanism, InvisibleInk):
            yield self._text(rows, mechanism, most)
            return
        left = _TOKENS_BY_PRIVATE * most
        while left > 0 and not mechanism.ended:
            text, count = self._text(rows, mechanism, left)
            left -= count + 1  # its end is a token too
            yield text, count

    def _text(self, rows: "_Rows", mechanism: InvisibleInk | Amin, most: int) -> tuple[str, int]:
        tokens: list[int] = []
        logits = rows.begin()
        while True:
            chances = mechanism.next_token(logits[0].double(), logits[1:].double())
            token = int(torch.multinomial(chances.cpu(), 1, generator=self._generator))
            if token == self._tokenizer.eos_token_id:
                break
            tokens.append(token)
            if len(tokens) == most or mechanism.ended or _END in self._tokenizer.decode(tokens):
                break
            logits = rows.append(token)
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


class _Rows:
    """Computes logits [1 + B, V] after B + 1 prompts and one text that follows them all, with one cache."""

    def __init__(self, network: "PreTrainedModel", prompts: Sequence[Sequence[int]]) -> None:
        from transformers import DynamicCache  # slow to import

        rows = [torch.tensor(prompt, device=network.device) for prompt in prompts]
        self._network = network
        self._cache = DynamicCache(config=network.config)
        self._prompt_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        self._mask = self._prompt_mask
        self._after_prompts = self._forward(pad_sequence(rows, batch_first=True, padding_side="left"))

    def begin(self) -> Tensor:
        """Returns the logits after the prompts, where a new text begins."""
        if text := self._mask.shape[1] - self._prompt_mask.shape[1]:
            self._cache.crop(-text)  # its last tokens
            self._mask = self._prompt_mask
        return self._after_prompts

    def append(self, token: int) -> Tensor:
        """Returns the logits after one more token of the text."""
        ids = torch.full((len(self._mask), 1), token, device=self._mask.device)
        self._mask = torch.cat([self._mask, torch.ones_like(ids)], dim=1)
        return self._forward(ids)

    @torch.inference_mode()
    def _forward(self, ids: Tensor) -> Tensor:
        answer = self._network(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = answer.logits[:, -1]
        return logits
