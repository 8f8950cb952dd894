"""Computes log-probabilities of the public model and of adapters at each token of texts, on the most likely tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from privmix.engine.engine import PUBLIC, AdapterFiles
from privmix.laboratory.evaluation.adapted_model import AdaptedModel


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """The models' outputs for S queries, each on its own k tokens.

    Attributes:
        public: float32 [S, k], log-probabilities of the public model.
        models: float32 [N, S, k], log-probabilities of the N models.
        wanted: int64 [S], the index among the k tokens of the attacker's target.
    """

    public: Tensor
    models: Tensor
    wanted: Tensor

    @property
    def of_wanted(self) -> Tensor:
        """The log-probabilities of the target, float32 [1 + N, S], of the public model first."""
        rows = torch.cat([self.public[None], self.models])
        return rows[:, torch.arange(len(self.wanted)), self.wanted]


class LocalModels:
    """A base model and a sequence of adapters, in this process."""

    def __init__(self, base: Path, adapters: Sequence[AdapterFiles]) -> None:
        transformers_logging.disable_progress_bar()
        named = {f"model-{index}": files for index, files in enumerate(adapters)}
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self._model = AdaptedModel(base, torch.float32, named)
        self._names = (PUBLIC, *named)

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def continuation(self, prompt: str, text: str, top_k: int) -> ModelOutput:
        """Returns the outputs at every token of a text after the prompt.

        Args:
            top_k: the number of the public model's most likely tokens to keep, like the service's option. If the
                text's own token is not among them, it replaces the least likely.
        """
        prefix, ids = self.tokens(prompt), self.tokens(prompt + text)
        wanted = torch.tensor(ids[len(prefix) :])
        rows = self._rows(torch.tensor([ids[:-1]]), len(wanted))
        public = next(rows)
        kept = public.topk(top_k, dim=1).indices
        missing = ~(kept == wanted[:, None]).any(dim=1)
        kept[missing, -1] = wanted[missing]
        place = (kept == wanted[:, None]).int().argmax(dim=1)
        outputs = [row.gather(1, kept) for row in rows]
        models = torch.stack(outputs) if outputs else torch.empty(0, *kept.shape)
        return ModelOutput(public.gather(1, kept), models, place)

    def _rows(self, context: Tensor, count: int) -> Iterator[Tensor]:
        """Yields the log-probabilities of each model in turn at the last tokens of a context [1, n], [count, V]."""
        context = context.to(self._model.device)
        cache = self._model.record(context)
        for name in self._names:
            logits = self._model.logits(name, context, count, cache)
            yield torch.log_softmax(logits.float(), dim=-1).flatten(0, 1).cpu()
