"""Samples secrets that suit a language model: texts that the public model itself writes at a high temperature.

The choice of canaries decides what an audit sees (Panda et al. 2025, "Privacy auditing of large language models").
After the prompt of a number, a model gives each digit a tenth. It gives much less to a text of high temperature, so a
model that was trained on the text differs more.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.laboratory.audit.worlds.canaries import SAMPLED_TOKENS

TEMPERATURE = 1.5
_AT_ONCE = 64


class SecretSampler:
    """Samples with a model; a `canaries.Sampler`."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

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
        tokens = torch.tensor([prefix] * _AT_ONCE)
        cache = None
        for _ in range(SAMPLED_TOKENS):
            output = self._model(
                input_ids=tokens if cache is None else tokens[:, -1:], past_key_values=cache, logits_to_keep=1
            )
            cache = output.past_key_values
            logits = output.logits[:, -1] / TEMPERATURE
            logits[:, self._tokenizer.all_special_ids] = -torch.inf
            reached = logits.softmax(dim=1).cumsum(dim=1)
            drawn = torch.tensor([[secrets.SystemRandom().random()] for _ in range(_AT_ONCE)])
            sampled = torch.searchsorted(reached, drawn * reached[:, -1:], right=True)
            tokens = torch.cat([tokens, sampled.clamp(max=reached.shape[1] - 1)], dim=1)
        return tokens[:, len(prefix) :]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids
