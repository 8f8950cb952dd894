"""transformers with PEFT as an `Engine`: one forward pass per row. The reference the vLLM engine is held against."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

from services.engine.engine import Engine, EngineSettings, Request
from services.engine.switching import using

MAX_CACHES = 256


@dataclass(slots=True)
class Cached:
    tokens: tuple[int, ...] = ()
    values: DynamicCache = field(default_factory=DynamicCache)


class TransformersEngine(Engine):
    """See `Engine`. Keeps the caches of the `MAX_CACHES` (sequence, adapter) pairs asked last."""

    def __init__(self, settings: EngineSettings) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
        self.vocabulary = model.config.vocab_size
        for name, path in settings.adapters.items():
            if isinstance(model, PeftModel):
                model.load_adapter(path, adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, path, adapter_name=name)
        self._model = model.to(device).eval()
        self._device = device
        self.adapters = tuple(settings.adapters)
        self.context_length = settings.context_length
        self._caches: OrderedDict[tuple[str, str], Cached] = OrderedDict()

    def release(self, sequence: str) -> None:
        for key in [key for key in self._caches if key[0] == sequence]:
            del self._caches[key]

    def close(self) -> None:
        self._caches.clear()
        del self._model

    def _next_token(self, requests: Sequence[Request]) -> torch.Tensor:
        rows = [self._row(request, adapter) for request in requests for adapter in request.adapters]
        return torch.stack(rows)

    @torch.inference_mode()
    def _row(self, request: Request, adapter: str) -> torch.Tensor:
        cached = self._cached((request.sequence, adapter), request.tokens)
        unseen = torch.tensor([request.tokens[len(cached.tokens) :]], device=self._device)
        with using(self._model, adapter):
            output = self._model(input_ids=unseen, past_key_values=cached.values, use_cache=True, logits_to_keep=1)
        cached.tokens = request.tokens
        return torch.log_softmax(output.logits[0, -1], dim=-1, dtype=torch.float32)

    def _cached(self, key: tuple[str, str], tokens: tuple[int, ...]) -> Cached:
        """The cache of the longest prefix that leaves at least one token to ask about."""
        cached = self._caches.pop(key, None) or Cached()
        shared = 0
        for seen, wanted in zip(cached.tokens, tokens[:-1], strict=False):
            if seen != wanted:
                break
            shared += 1
        if shared < len(cached.tokens):
            cached.values.crop(shared)
            cached.tokens = cached.tokens[:shared]
        self._caches[key] = cached
        while len(self._caches) > MAX_CACHES:
            self._caches.popitem(last=False)
        return cached
