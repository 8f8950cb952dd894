"""Writes labelled text by a published mechanism from references in prompts, as a directory for `evaluate task`.

The prompt of a reference shows its text and asks for another of the same label; the public prompt names the label only.
Who is in the corpus, and with which labels, is public; the texts are not (`guarantee`). Draws come from a seeded
generator, because the texts are for comparison and not for publication.
"""

import hashlib
import hmac
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from privmix.foundation.errors import InputError
from privmix.foundation.files import write_atomically
from privmix.foundation.json_lines import write_lines
from privmix.generation.card import JSON_FILE as CARD
from privmix.generation.job import JOB, OUTPUT
from privmix.laboratory.utility.labelled import Labelled
from privmix.laboratory.utility.references import Amin, InvisibleInk

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
        references: B, the largest number of users of a batch, each with one reference.
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
    """Holds one reference of each of at most `references` users, B, all with one label.

    The public model stands for a reference that is missing, so that each of B has the same weight.
    """

    label: str
    texts: tuple[str, ...]
    references: int


def batches(real: Labelled, references: int, seed: int) -> list[ReferenceBatch]:
    """Divides users into batches of one label, each user in at most one batch, with one text.

    A label has as many batches as its users fill. A keyed hash of the user alone chooses the batch, which takes the B
    users with the smallest hashes; it also chooses among the user's own labels, and among the texts with that label. So
    a user's texts are one reference of one batch, and all other references stay, whatever replaces these texts.

    Raises:
        InputError: no label has enough users.
    """
    key = f"references {seed}".encode()
    own: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for user, label, text in zip(real.users, real.labels, real.texts, strict=True):
        own[user][label].append(text)
    members: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for user, labelled in own.items():
        label = min(labelled, key=lambda each: _hash(key, user, "label", each))
        texts = labelled[label]
        members[label].append((_hash(key, user, "batch"), texts[_hash(key, user, "text") % len(texts)]))
    found = [
        ReferenceBatch(label, tuple(_batch(members[label], number, count, references)), references)
        for label in sorted(members)
        if (count := len(members[label]) // references)
        for number in range(count)
    ]
    if not found:
        raise InputError(f"references: no label has {references} users; use fewer references")
    return found


def _batch(members: Sequence[tuple[int, str]], number: int, count: int, references: int) -> list[str]:
    """Returns the texts of one of `count` batches of the members of a label, each a hash and a text."""
    ordered = sorted((hashed // count, text) for hashed, text in members if hashed % count == number)
    return [text for _, text in ordered[:references]]


def _hash(key: bytes, *words: str) -> int:
    return int.from_bytes(hmac.digest(key, json.dumps(words).encode(), hashlib.sha256), "big")


def guarantee(options: ReferenceOptions) -> str:
    """States the guarantee of all texts in one sentence."""
    return (
        f"({options.epsilon:g}, {options.delta:g})-differential privacy for the texts of one user, replaced by any "
        "others with the same labels; who is in the corpus, and with which labels, is public."
    )


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
        "guarantee": guarantee(options),
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
        rows = _Rows(self._network, self._prompts(batch, field), batch.references)
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
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]
        return tokens


class _Rows:
    """Computes logits [1 + B, V] after the public prompt, at most B others, and one text that follows them all.

    They have one cache. The rows of missing prompts are the public one.
    """

    def __init__(self, network: "PreTrainedModel", prompts: Sequence[Sequence[int]], references: int) -> None:
        from transformers import DynamicCache  # slow to import

        rows = [torch.tensor(prompt, device=network.device) for prompt in prompts]
        self._network = network
        self._missing = 1 + references - len(prompts)
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
        return torch.cat([logits, logits[:1].expand(self._missing, -1)])
