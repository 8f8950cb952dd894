"""Samples secrets that suit a language model: texts that the public model itself writes at a high temperature.

The choice of canaries decides what an audit sees (Panda et al. 2025, "Privacy auditing of large language models").
After the prompt of a number, a model gives each digit a tenth. It gives much less to a text of high temperature, so a
model that was trained on the text differs more.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from privmix.laboratory.audit.canaries import SAMPLED_TOKENS, Sampler

TEMPERATURE = 1.5
_AT_ONCE = 64


def sampler_of(public: Path) -> Sampler:
    """Returns a function that samples with a model."""
    tokenizer: Any = AutoTokenizer.from_pretrained(public)
    model: Any = AutoModelForCausalLM.from_pretrained(public, dtype=torch.float32).eval()
    torch.seed()  # other secrets in each corpus

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    def sample(prompt: str, count: int) -> Sequence[str]:
        """Returns ``count`` different texts whose tokens after the prompt are those that were sampled."""
        prefix, found = ids_of(prompt), dict[str, None]()
        while len(found) < count:
            sampled = model.generate(
                torch.tensor([prefix]),
                attention_mask=torch.ones(1, len(prefix), dtype=torch.long),
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                top_p=1.0,
                max_new_tokens=SAMPLED_TOKENS,
                num_return_sequences=_AT_ONCE,
                suppress_tokens=tokenizer.all_special_ids,
                pad_token_id=tokenizer.eos_token_id,
            )
            for ids in sampled[:, len(prefix) :].tolist():
                text = tokenizer.decode(ids)
                # The attacker, who asks for the text alone, and a training, which reads on, see the same tokens.
                if all(ids_of(prompt + text + end)[: len(prefix) + len(ids)] == prefix + ids for end in ("", ".")):
                    found[text] = None
        return list(found)[:count]

    return sample
