"""Samples secrets that suit a language model: texts that the public model itself writes at a high temperature.

The choice of canaries decides what an audit sees (Panda et al. 2025, "Privacy auditing of large language models").
After the prompt of a number, a model gives each digit a tenth. It gives much less to a text of high temperature, so a
model that was trained on the text differs more.
"""

import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from privmix.laboratory.audit.canaries import SAMPLED_TOKENS

TEMPERATURE = 1.5
_AT_ONCE = 64


class SecretSampler:
    """Samples with a model, which is loaded with the first call; a `canaries.Sampler`."""

    def __init__(self, model: Path) -> None:
        self._path = model

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._path)

    @cached_property
    def _model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32).eval()

    def __call__(self, prompt: str, count: int) -> Sequence[str]:
        """Returns ``count`` different texts whose tokens after the prompt are those that were sampled."""
        prefix = self._ids(prompt)
        found: dict[str, None] = {}
        while len(found) < count:
            for ids in self._sample(prefix).tolist():
                text = self._tokenizer.decode(ids)
                # The attacker, who asks for the text alone, and a training, which reads on, see the same tokens.
                if all(self._ids(prompt + text + end)[: len(prefix) + len(ids)] == prefix + ids for end in ("", ".")):
                    found[text] = None
        return list(found)[:count]

    @torch.inference_mode()
    def _sample(self, prefix: list[int]) -> Tensor:
        output = self._model(input_ids=torch.tensor([prefix]), logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits.expand(_AT_ONCE, -1, -1)
        cache.batch_repeat_interleave(_AT_ONCE)
        sampled = [self._drawn(logits[:, -1])]
        while len(sampled) < SAMPLED_TOKENS:
            output = self._model(input_ids=sampled[-1], past_key_values=cache)
            sampled.append(self._drawn(output.logits[:, -1]))
        return torch.cat(sampled, dim=1)

    def _drawn(self, logits: Tensor) -> Tensor:
        """Samples a token from each row, by the operating system's randomness: int64 [rows, 1]."""
        allowed = logits / TEMPERATURE
        allowed[:, self._tokenizer.all_special_ids] = -torch.inf
        reached = allowed.softmax(dim=1).cumsum(dim=1)
        chance = secrets.SystemRandom()
        drawn = torch.tensor([[chance.random()] for _ in range(len(logits))]) * reached[:, -1:]
        return torch.searchsorted(reached, drawn, right=True).clamp(max=logits.shape[1] - 1)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids
