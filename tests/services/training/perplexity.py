"""Perplexity of the public model, of each part model, and of their mean, on held-out text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.training.manifest import Manifest


@dataclass(frozen=True)
class Perplexities:
    """Per token, over the same tokens."""

    public: float
    mixture: float
    parts: tuple[float, ...]


def perplexities(ensemble: Path, base: Path, texts: Iterable[str]) -> Perplexities:
    """Perplexity of every token of `texts` but the first of each; the mixture is the mean of the part models."""
    manifest = Manifest.load(ensemble)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    sequences = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    public = torch.cat([_log_probabilities(model, sequence) for sequence in sequences])
    first, *others = manifest.parts
    adapted = PeftModel.from_pretrained(model, manifest.adapter_path(ensemble, first), adapter_name=first.name)
    for part in others:
        adapted.load_adapter(manifest.adapter_path(ensemble, part), adapter_name=part.name)
    rows = []
    for part in manifest.parts:
        adapted.set_adapter(part.name)
        rows.append(torch.cat([_log_probabilities(adapted, sequence) for sequence in sequences]))
    parts = torch.stack(rows)
    return Perplexities(
        public=_perplexity(public),
        mixture=_perplexity(parts.logsumexp(0) - math.log(len(rows))),
        parts=tuple(_perplexity(row) for row in rows),
    )


@torch.inference_mode()
def _log_probabilities(model: torch.nn.Module, sequence: Tensor) -> Tensor:
    logits = model(input_ids=sequence).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, sequence[0, 1:, None])[:, 0]


def _perplexity(log_probabilities: Tensor) -> float:
    return math.exp(-log_probabilities.mean().item())
