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

    def continuations(self, prompt: str, texts: Sequence[str], top_k: int) -> ModelOutput:
        """Returns the outputs at every token of each text after the prompt.

        Args:
            texts: continuations of the same number of tokens, n.
            top_k: the number of the public model's most likely tokens to keep, like the service's option. If the
                text's own token is not among them, it replaces the least likely.

        Returns:
            S = len(texts) * n queries, text by text.

        Raises:
            ValueError: the texts have different numbers of tokens.
        """
        prefix = self.tokens(prompt)
        continuations = [self.tokens(prompt + text)[len(prefix) :] for text in texts]
        if len({len(ids) for ids in continuations}) != 1:
            raise ValueError("texts must have the same number of tokens")
        wanted = torch.tensor(continuations)
        rows = self._rows(prefix, wanted)
        public = next(rows)
        kept = public.topk(top_k, dim=1).indices
        missing = ~(kept == wanted.view(-1, 1)).any(dim=1)
        kept[missing, -1] = wanted.view(-1)[missing]
        place = (kept == wanted.view(-1, 1)).int().argmax(dim=1)
        outputs = [row.gather(1, kept) for row in rows]
        models = torch.stack(outputs) if outputs else torch.empty(0, *kept.shape)
        return ModelOutput(public.gather(1, kept), models, place)

    def _rows(self, prefix: list[int], wanted: Tensor) -> Iterator[Tensor]:
        """Yields the log-probabilities of each model in turn, float32 [texts * n, V]."""
        texts, count = wanted.shape
        contexts = torch.cat([torch.tensor(prefix).expand(texts, -1), wanted[:, :-1]], dim=1).to(self._model.device)
        cache = self._model.record(contexts)
        for name in self._names:
            logits = self._model.logits(name, contexts, count, cache)
            yield torch.log_softmax(logits.float(), dim=-1).flatten(0, 1).cpu()
