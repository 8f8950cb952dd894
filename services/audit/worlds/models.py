"""Log-probabilities of the public model and every adapter at places of texts, on the tokens that an attacker keeps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from services.engine.adapted_model import AdaptedModel
from services.engine.engine import PUBLIC, AdapterFiles


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """Answers to a number of queries, each on k tokens of its own.

    Attributes:
        public: float32 [S, k], log-probabilities of the public model.
        models: float32 [N, S, k], those of every model.
        wanted: int64 [S], which of the k tokens the attacker hopes for.
    """

    public: Tensor
    models: Tensor
    wanted: Tensor


class Models:
    """A base model and its adapters, in this process."""

    def __init__(self, base: Path, adapters: Mapping[str, AdapterFiles]) -> None:
        transformers_logging.disable_progress_bar()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self._model = AdaptedModel(base, torch.float32, adapters)
        self._names = (PUBLIC, *adapters)

    def tokens(self, text: str) -> list[int]:
        """The text's token ids."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def continuations(self, prompt: str, texts: Sequence[str], top_k: int) -> ModelOutput:
        """At every token of each text after the prompt.

        Args:
            texts: continuations of the same number of tokens, n.
            top_k: how many of the public model's likeliest tokens are kept, as the service's option does; the token
                that stands in the text is kept besides, as the least likely of them.

        Returns:
            queries for every text and token, the tokens of a text together: S = len(texts) * n.

        Raises:
            ValueError: the texts have different numbers of tokens.
        """
        before = self.tokens(prompt)
        after = [self.tokens(prompt + text)[len(before) :] for text in texts]
        if len({len(ids) for ids in after}) != 1:
            raise ValueError("texts must have the same number of tokens")
        wanted = torch.tensor(after)
        rows = self._rows(before, wanted)
        public = next(rows)
        kept = public.topk(top_k, dim=1).indices
        missing = ~(kept == wanted.view(-1, 1)).any(dim=1)
        kept[missing, -1] = wanted.view(-1)[missing]
        place = (kept == wanted.view(-1, 1)).int().argmax(dim=1)
        asked = [row.gather(1, kept) for row in rows]
        none = torch.empty(0, *kept.shape)
        return ModelOutput(public.gather(1, kept), torch.stack(asked) if asked else none, place)

    def _rows(self, before: list[int], wanted: Tensor) -> Iterator[Tensor]:
        """float32 [texts * n, V] of each model in its turn."""
        texts, count = wanted.shape
        contexts = torch.cat([torch.tensor(before).expand(texts, -1), wanted[:, :-1]], dim=1).to(self._model.device)
        cache = self._model.record(contexts)
        for name in self._names:
            logits = self._model.logits(name, contexts, count, cache)
            yield torch.log_softmax(logits.float(), dim=-1).flatten(0, 1).cpu()
