"""Implements `Engine` with transformers and PEFT, one forward pass for each row: the reference for the vLLM engine."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from privmix.engine.adapter_config import first_layer, read_adapter_configs
from privmix.engine.engine import PUBLIC, ZERO, Engine, EngineSettings, Request
from privmix.engine.part_text import read_texts
from privmix.engine.reader_attention import PublicCache, check_reader, record_text
from privmix.engine.switching import using

MAX_CACHES = 256
"""The maximum number of caches, or with plain LoRA adapters, of sequences with a cache for each of them."""


@dataclass(slots=True)
class Cached:
    """Holds one model's keys and values for the first tokens of a sequence."""

    tokens: tuple[int, ...] = ()
    values: PublicCache = field(default_factory=PublicCache)


class TransformersEngine(Engine):
    """Implements `Engine`. Keeps the most recently used caches."""

    def __init__(self, settings: EngineSettings) -> None:
        configs = read_adapter_configs(settings.adapters, settings.part_kind)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
        self.vocabulary = model.config.vocab_size
        if settings.part_kind == "reader":
            first_layer(configs, model.config.get_text_config().num_hidden_layers)  # refuses what serving refuses
            for config in configs:
                check_reader(model, config.targets)
        for name, path in settings.adapters.items() if configs else ():
            if isinstance(model, PeftModel):
                model.load_adapter(path, adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, path, adapter_name=name)
        if configs:  # PEFT initializes B to zero, so this adapter changes nothing
            model.add_adapter(ZERO, LoraConfig(r=configs[0].rank, target_modules=list(configs[0].targets)))
        self._zero = ZERO if configs else PUBLIC
        self._model = model.to(device).eval()
        self._device = device
        self.adapters = tuple(settings.adapters)
        self.context_length = settings.context_length
        self.owners = self.adapters if settings.part_kind == "lora" else ()
        self._caches: OrderedDict[tuple[str, str], Cached] = OrderedDict()
        texts = read_texts(settings.adapters) if settings.part_kind == "text" else {}
        if texts:
            texts[ZERO] = torch.zeros_like(next(iter(texts.values())))
        self._texts = {name: record_text(self._model, text.to(device)) for name, text in texts.items()}

    def drop_caches(self, sequence: str) -> None:
        for key in [key for key in self._caches if key[0] == sequence]:
            del self._caches[key]

    def close(self) -> None:
        self._caches.clear()
        del self._model

    def _logits(self, requests: Sequence[Request]) -> torch.Tensor:
        return torch.stack([row for request in requests for row in self._rows(request)])

    @torch.inference_mode()
    def _rows(self, request: Request) -> list[torch.Tensor]:
        results: dict[str, tuple[Cached, torch.Tensor]] = {}
        rows = []
        for name in request.adapters:
            owner = name if name in self.owners else PUBLIC
            if owner not in results:
                results[owner] = self._read_on(request, owner)
            cached, row = results[owner]
            if name in self._texts:
                row = self._forward(PUBLIC, request.tokens[-1:], cached.values.reader(1, self._texts[name]))
            elif name != owner:
                row = self._forward(self._zero if name == ZERO else name, request.tokens[-1:], cached.values.reader(1))
            rows.append(row)
        return rows

    def _read_on(self, request: Request, model: str) -> tuple[Cached, torch.Tensor]:
        """Runs a model over the new tokens of a sequence; returns its cache and its row at the last position."""
        cached = self._cached((request.sequence, model), request.tokens)
        row = self._forward(model, request.tokens[len(cached.tokens) :], cached.values)
        cached.tokens = tuple(request.tokens)
        return cached, row

    def _forward(self, model: str, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        input_ids = torch.tensor([tokens], device=self._device)
        with using(self._model, model):
            output = self._model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _cached(self, key: tuple[str, str], tokens: Sequence[int]) -> Cached:
        """Returns the cache, cropped to the longest shared prefix that leaves at least one token to run."""
        cached = self._caches.pop(key, None) or Cached()
        shared = 0
        for cached_token, token in zip(cached.tokens, tokens[:-1], strict=False):
            if cached_token != token:
                break
            shared += 1
        if shared < len(cached.tokens):
            cached.values.crop(shared - len(cached.tokens))
            cached.tokens = cached.tokens[:shared]
        self._caches[key] = cached
        while len(self._caches) > MAX_CACHES * (1 + len(self.owners)):
            self._caches.popitem(last=False)
        return cached
