"""Computes the perplexity of the public model, of each part model, and of their mean, on held-out text."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from privmix.engine.engine import PUBLIC, AdapterFiles
from privmix.laboratory.evaluation.adapted_model import AdaptedModel
from privmix.training.manifest import Manifest


@dataclass(frozen=True)
class Perplexities:
    """The perplexities per token, over the same tokens."""

    public: float
    mixture: float
    parts: tuple[float, ...]


def perplexities(ensemble: Path, base: Path, texts: Iterable[str]) -> Perplexities:
    """Computes the perplexity of `texts` without each first token. The mixture is the mean of the part models."""
    manifest = Manifest.load(ensemble)
    tokenizer = AutoTokenizer.from_pretrained(base)
    files = {
        part.name: AdapterFiles(manifest.adapter_path(ensemble, part), manifest.part_kind) for part in manifest.parts
    }
    model = AdaptedModel(base, torch.bfloat16, files)
    sequences = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    scores = [_log_probabilities(model, (PUBLIC, *files), sequence) for sequence in sequences]
    public, *rows = (torch.cat(pieces) for pieces in zip(*scores, strict=True))
    parts = torch.stack(rows)
    return Perplexities(
        public=_perplexity(public),
        mixture=_perplexity(parts.logsumexp(0) - math.log(len(rows))),
        parts=tuple(_perplexity(row) for row in rows),
    )


def _log_probabilities(model: AdaptedModel, names: Sequence[str], sequence: Tensor) -> list[Tensor]:
    cache = model.record(sequence)
    logits = (model.logits(name, sequence, sequence.shape[1], cache)[0, :-1].float() for name in names)
    return [rows.log_softmax(-1).gather(-1, sequence[0, 1:, None])[:, 0] for rows in logits]


def _perplexity(log_probabilities: Tensor) -> float:
    return math.exp(-log_probabilities.mean().item())
