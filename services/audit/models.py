"""What the public model and every adapter say at chosen places of texts, on the tokens an attacker lets through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from services.engine.engine import PUBLIC
from services.engine.switching import using


@dataclass(frozen=True, eq=False)
class Said:
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

    def __init__(self, base: Path, adapters: Mapping[str, Path]) -> None:
        transformers_logging.disable_progress_bar()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        for name, path in adapters.items():
            if isinstance(model, PeftModel):
                model.load_adapter(path, adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, path, adapter_name=name)
        self._model = model.eval()
        self._names = (PUBLIC, *adapters)

    def tokens(self, text: str) -> list[int]:
        """The text's token ids."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def continuations(self, prompt: str, texts: Sequence[str], top_k: int) -> Said:
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
        rows = (self._rows(name, before, wanted) for name in self._names)
        public = next(rows)
        kept = public.topk(top_k, dim=1).indices
        missing = ~(kept == wanted.view(-1, 1)).any(dim=1)
        kept[missing, -1] = wanted.view(-1)[missing]
        place = (kept == wanted.view(-1, 1)).int().argmax(dim=1)
        asked = [row.gather(1, kept) for row in rows]
        none = torch.empty(0, *kept.shape)
        return Said(public.gather(1, kept), torch.stack(asked) if asked else none, place)

    @torch.inference_mode()
    def _rows(self, name: str, before: list[int], wanted: Tensor) -> Tensor:
        """float32 [texts * n, V]; the prompt is read once."""
        with using(self._model, name):
            first = self._model(input_ids=torch.tensor([before]), use_cache=True, logits_to_keep=1)
            logits = first.logits.expand(len(wanted), -1, -1)
            if wanted.shape[1] > 1:
                cache = first.past_key_values
                cache.batch_repeat_interleave(len(wanted))
                rest = self._model(input_ids=wanted[:, :-1], past_key_values=cache, use_cache=True).logits
                logits = torch.cat([logits, rest], dim=1)
        return torch.log_softmax(logits.float(), dim=-1).flatten(0, 1)
