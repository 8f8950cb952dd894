"""Runs a public model and its adapters in transformers, as each manifest's `part_kind` says.

    model = AdaptedModel(base, torch.bfloat16)
    model.load("part-000", AdapterFiles(path, manifest.part_kind))
    cache = model.record(tokens)
    public, part = (model.logits(name, tokens, tokens.shape[1], cache) for name in (PUBLIC, "part-000"))

Evaluation and audits use it; serving uses the engines. One pass of the public model serves all readers.
"""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from privmix.engine import PartKind
from privmix.engine.engine import PUBLIC, AdapterFiles
from privmix.engine.part_text import read_text
from privmix.engine.reader_attention import PublicCache, record, record_text
from privmix.engine.switching import using


class AdaptedModel:
    """Computes logits of the base model and of its adapters, without gradients, on a GPU if one is present."""

    def __init__(self, base: Path, dtype: torch.dtype) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.base: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(self.device).eval()
        self._model = self.base
        self._part_kinds: dict[str, PartKind] = {}
        self._texts: dict[str, PublicCache] = {}

    def load(self, name: str, files: AdapterFiles) -> None:
        self._part_kinds[name] = files.part_kind
        if files.part_kind == "text":
            self._texts[name] = record_text(self.base, read_text(files.path).to(self.device))
            return
        if isinstance(self._model, PeftModel):
            self._model.load_adapter(files.path, adapter_name=name)
        else:
            self._model = PeftModel.from_pretrained(self._model, files.path, adapter_name=name)
        self._model.eval()

    def unload(self) -> None:
        """Removes all adapters."""
        if isinstance(self._model, PeftModel):
            self._model.unload()
        self._model = self.base
        self._part_kinds.clear()
        self._texts.clear()

    @torch.inference_mode()
    def record(self, tokens: Tensor) -> PublicCache:
        """Returns the public model's keys and values for sequences [B, T]; an empty cache if no adapter uses them."""
        return record(self._model, tokens) if {"reader", "text"} & set(self._part_kinds.values()) else PublicCache()

    @torch.inference_mode()
    def logits(self, name: str, tokens: Tensor, positions: int, cache: PublicCache) -> Tensor:
        """Returns the logits after each of the last `positions` tokens, [B, positions, V].

        Args:
            name: the name of an adapter, or `PUBLIC`.
            tokens: whole sequences, [B, T].
            cache: the result of `record` for the same sequences.
        """
        text = self._texts.get(name)
        with using(self._model, PUBLIC if text is not None else name):
            if self._part_kinds.get(name) in ("reader", "text"):
                output = self._model(input_ids=tokens[:, -positions:], past_key_values=cache.reader(positions, text))
            else:
                output = self._model(input_ids=tokens, use_cache=False, logits_to_keep=positions)
        logits: Tensor = output.logits
        return logits
