"""Reader attention in transformers: an adapted model that attends to the public model's keys and values.

    cache = PublicCache()
    with using(model, PUBLIC):
        public = model(input_ids=tokens, past_key_values=cache).logits
    with using(model, "part-000"):
        part = model(input_ids=tokens, past_key_values=cache.reader(tokens.shape[1])).logits

A reader runs the usual forward pass on a cache that it cannot write: in every layer it computes queries from its own
hidden states and attends to what the public model left there, its own position included. So the design needs no code in
the model and works with every attention implementation. The idea is that of ICaRus (ICLR 2026).

All positions of a block are one pass, as above. One position of a sequence that is kept is `cache.reader(1)` after the
public model has read that position's token, too:

    model(input_ids=tokens[:, -1:], past_key_values=cache.reader(1)).logits[:, -1]
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from services.engine.adapter_config import KEYS_AND_VALUES
from services.engine.engine import PUBLIC
from services.engine.switching import using

TARGETS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What an adapter can change in a reader: everything but the keys and values, which are never its own."""


class ReaderError(ValueError):
    """The model or the adapter cannot be a reader; the message names what is missing or too much."""


class PublicCache(DynamicCache):  # type: ignore[misc]
    """The public model's keys and values at every position of some sequences, which grows as that model reads on.

    Layers with a sliding window keep all positions, too: the window is then a matter of the mask, and `crop` works.
    """

    def __init__(self) -> None:
        super().__init__()

    def reader(self, positions: int) -> Cache:
        """A view for one forward pass of a reader over the last `positions` tokens that the public model has read.

        The pass reads the cache and leaves it as it is. No gradient flows into it.

        Raises:
            ReaderError: the public model has read fewer tokens.
        """
        length = self.get_seq_length()
        if not 0 < positions <= length:
            raise ReaderError(f"positions: a reader is asked about {positions}, the public model has read {length}")
        return Cache(layers=[_ReadOnlyLayer(layer.keys, layer.values, positions) for layer in self.layers])

    def split(self) -> list["PublicCache"]:
        """A cache for each sequence, with memory of its own."""
        return [
            self._of((layer.keys[row, None].clone(), layer.values[row, None].clone()) for layer in self.layers)
            for row in range(len(self.layers[0].keys))
        ]

    @classmethod
    def stack(cls, caches: Sequence["PublicCache"]) -> "PublicCache":
        """One cache for sequences of the same length, in their order."""
        layers = zip(*(cache.layers for cache in caches), strict=True)
        return cls._of(
            (torch.cat([layer.keys for layer in rows]), torch.cat([layer.values for layer in rows])) for rows in layers
        )

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    @classmethod
    def _of(cls, layers: Iterable[tuple[Tensor, Tensor]]) -> "PublicCache":
        cache = cls()
        for index, (keys, values) in enumerate(layers):
            cache.update(keys, values, index)
        return cache


def record(model: Any, tokens: Tensor, cache: PublicCache | None = None) -> PublicCache:
    """Run the public model over `tokens`, with adapters disabled and without gradients, for its keys and values alone.

    Args:
        model: a causal language model, with or without PEFT adapters.
        tokens: int64 [sequences, tokens], those that come after what `cache` holds.
        cache: of the same sequences; it is extended in place.

    Raises:
        ReaderError: a layer of the model has no keys and values that a reader could attend to.
    """
    cache = PublicCache() if cache is None else cache
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.no_grad(), using(model, PUBLIC):
        base.get_decoder()(input_ids=tokens, past_key_values=cache, use_cache=True)
    _check_layers(base.config.get_text_config(), cache)
    return cache


def check_reader(model: Any, targets: Iterable[str]) -> None:
    """Check that an adapter on the modules of these names can be a reader of the model.

    Raises:
        ReaderError: names what the model does not have, or the modules that a reader never uses.
    """
    if unused := sorted(set(targets) & set(KEYS_AND_VALUES)):
        raise ReaderError(f"a reader has no keys and values of its own: leave out {', '.join(unused)}")
    check_modules(model, targets)
    record(model, torch.zeros(1, 2, dtype=torch.long, device=model.device))


def check_modules(model: Any, targets: Iterable[str]) -> None:
    """Check that the model has modules of all these names.

    Raises:
        ReaderError: names those that it does not have.
    """
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if missing := sorted(set(targets) - present):
        raise ReaderError(f"the model has no modules named {', '.join(missing)}")


class _ReadOnlyLayer(CacheLayerMixin):  # type: ignore[misc]
    """What one layer attends to, whatever keys and values the running model computes itself."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, positions: int) -> None:
        super().__init__()
        self.keys, self.values = keys.detach(), values.detach()
        self.is_initialized = True
        self._length: int = keys.shape[-2]
        self._asked = positions

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do: the layer is made from its contents."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[-2] != self._asked:
            raise ReaderError(f"positions: the view is for {self._asked}, the reader was run on {key_states.shape[-2]}")
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length, 0

    def get_seq_length(self) -> int:
        return self._length - self._asked

    def get_max_length(self) -> int:
        return self._length


def _check_layers(config: Any, cache: PublicCache) -> None:
    expected = range(config.num_hidden_layers)
    if missing := [layer for layer in expected if layer >= len(cache.layers) or cache.get_seq_length(layer) == 0]:
        layers = ", ".join(map(str, missing)) if len(missing) < len(expected) else "all layers"
        raise ReaderError(
            f"a reader attends to the public model's keys and values, and {config.model_type} puts none into "
            f"transformers' cache in {layers}"
        )
