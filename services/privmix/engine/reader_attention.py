"""Implements reader attention in transformers: an adapted model attends to the public model's keys and values.

    cache = PublicCache()
    with using(model, PUBLIC):
        public = model(input_ids=tokens, past_key_values=cache).logits
    with using(model, "part-000"):
        part = model(input_ids=tokens, past_key_values=cache.reader(tokens.shape[1])).logits

A reader runs the usual forward pass with a read-only cache: in every layer it computes queries from its own hidden
states and attends to the public model's keys and values, its own position included. So the method needs no change in
the model and works with every attention implementation. The idea comes from ICaRus (ICLR 2026).

The example above computes all positions of a block in one pass. To compute only the last position of a cached sequence,
let the public model read its token first, and then use `cache.reader(1)`:

    model(input_ids=tokens[:, -1:], past_key_values=cache.reader(1)).logits[:, -1]

An adapter that changes only the layers from `fork` on is a late reader: below the fork its hidden states are the public
model's. `record` keeps them, and the pass of the reader starts there:

    cache = record(model, tokens, fork=15)
    with from_fork(model, cache):
        part = model(input_ids=tokens, past_key_values=cache.reader(tokens.shape[1])).logits

A reader can also attend to a text before the sequence, without any adapter:

    text = record_text(model, text_tokens)
    row = model(input_ids=tokens[:, -1:], past_key_values=cache.reader(1, text)).logits[:, -1]

The text has the positions before 0, and the sequence's keys and values are those of the public model, which has not
read the text. So one cache of a sequence serves any number of texts.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from privmix.engine.adapter_config import KEYS_AND_VALUES
from privmix.engine.engine import PUBLIC
from privmix.engine.switching import using
from privmix.foundation.errors import ReaderError


class PublicCache(DynamicCache):  # type: ignore[misc]
    """Holds the public model's keys and values at every position of a batch of sequences.

    Layers with a sliding window keep all positions too. The mask applies the window, and `crop` works.

    Attributes:
        fork: the first layer whose keys and values it holds. Layers below have none.
        states: the hidden states before that layer, [sequences, tokens, hidden]; None if it is the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fork = 0
        self.states: Tensor | None = None

    def keep_from(self, fork: int, states: Tensor) -> None:
        """Drops the keys and values below layer `fork`, before which the hidden states are `states`."""
        self.fork, self.states = fork, states
        for layer in self.layers[:fork]:  # one number a position, because masks follow from the lengths of layer 0
            layer.keys = layer.values = layer.keys[:, :1, :, :1].clone()

    def reader(self, positions: int, text: "PublicCache | None" = None) -> Cache:
        """Returns a read-only view for one forward pass of a reader over the last `positions` tokens of the cache.

        No gradient flows into the cache.

        Args:
            text: the result of `record_text`, whose keys and values come before those of every sequence.

        Raises:
            ReaderError: the public model has read fewer tokens.
        """
        length = self.get_seq_length()
        if not 0 < positions <= length:
            raise ReaderError(f"positions: got {positions}, but the public model has read {length} tokens")
        if text is None:
            return Cache(layers=[_ReadOnlyLayer(layer.keys, layer.values, positions) for layer in self.layers])
        before = text.get_seq_length()
        layers = [
            _ReadOnlyLayer(_after(first.keys, layer.keys), _after(first.values, layer.values), positions, before)
            for first, layer in zip(text.layers, self.layers, strict=True)
        ]
        return _AfterText(before, layers)

    def split(self) -> list["PublicCache"]:
        """Returns a separate copy of the cache for each sequence."""
        return [
            self._of(
                ((layer.keys[row, None].clone(), layer.values[row, None].clone()) for layer in self.layers),
                self.fork,
                None if self.states is None else self.states[row, None].clone(),
            )
            for row in range(len(self.layers[0].keys))
        ]

    @classmethod
    def stack(cls, caches: Sequence["PublicCache"]) -> "PublicCache":
        """Joins caches of sequences of the same length into one batch."""
        layers = zip(*(cache.layers for cache in caches), strict=True)
        states = [cache.states for cache in caches if cache.states is not None]
        return cls._of(
            (
                (torch.cat([layer.keys for layer in rows]), torch.cat([layer.values for layer in rows]))
                for rows in layers
            ),
            caches[0].fork,
            torch.cat(states) if states else None,
        )

    @property
    def nbytes(self) -> int:
        states: int = 0 if self.states is None else self.states.nbytes
        return states + sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in self.layers)

    @classmethod
    def _of(cls, layers: Iterable[tuple[Tensor, Tensor]], fork: int, states: Tensor | None) -> "PublicCache":
        cache = cls()
        for index, (keys, values) in enumerate(layers):
            cache.update(keys, values, index)
        cache.fork, cache.states = fork, states
        return cache


def record(model: Any, tokens: Tensor, cache: PublicCache | None = None, *, fork: int = 0) -> PublicCache:
    """Runs the public model over `tokens`, without adapters and gradients, and returns its keys and values.

    Args:
        model: a causal language model, with or without PEFT adapters.
        tokens: int64 [sequences, tokens], the tokens that follow the content of `cache`.
        cache: the cache of the same sequences, extended in place; by default a new one.
        fork: the first layer of the readers of a new cache. Above 0, the cache serves only passes of `from_fork`.

    Raises:
        ReaderError: a layer of the model puts no keys and values into the cache, or it cannot be forked.
    """
    cache = PublicCache() if cache is None else cache
    states: list[Any] = []
    decoder = _decoder(model)
    handle = decoder.layers[fork - 1].register_forward_hook(lambda *call: states.append(call[-1])) if fork else None
    try:
        with torch.no_grad(), using(model, PUBLIC):
            decoder(input_ids=tokens, past_key_values=cache, use_cache=True)
    finally:
        if handle:
            handle.remove()
    _check_layers(decoder.config.get_text_config(), cache)
    if fork:
        if not isinstance(states[0], Tensor):
            raise ReaderError(
                f"layers: {decoder.config.model_type} cannot run its last layers alone; change all layers"
            )
        cache.keep_from(fork, states[0])
    return cache


@contextmanager
def from_fork(model: Any, cache: PublicCache) -> Iterator[None]:
    """Lets passes of the model start at the cache's fork: its states replace those that the lower layers compute."""
    layers = _decoder(model).layers
    lower = list(layers[: cache.fork])
    try:
        for index in range(cache.fork):
            layers[index] = _Recorded(cache.states if index == cache.fork - 1 else None)
        yield
    finally:
        for index, layer in enumerate(lower):
            layers[index] = layer


def record_text(model: Any, tokens: Tensor) -> PublicCache:
    """Returns the public model's keys and values for a text at the positions before a sequence.

    Args:
        model: a causal language model with rotary positions, which may be negative.
        tokens: int64 [tokens].

    Raises:
        ReaderError: the model has no rotary positions, or a layer puts no keys and values into the cache.
    """
    cache = PublicCache()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not any(name.rpartition(".")[2] == "rotary_emb" for name, _ in base.named_modules()):
        raise ReaderError(f"a text before the sequence needs rotary positions, which {base.config.model_type} has not")
    positions = torch.arange(-len(tokens), 0, device=tokens.device)[None]
    with torch.no_grad(), using(model, PUBLIC):
        base.get_decoder()(input_ids=tokens[None], position_ids=positions, past_key_values=cache, use_cache=True)
    _check_layers(base.config.get_text_config(), cache)
    return cache


def check_reader(model: Any, targets: Iterable[str]) -> None:
    """Checks that an adapter on the modules with these names can be a reader of the model.

    Raises:
        ReaderError: the model lacks a module or a layer's cache, or a reader never uses one of the modules.
    """
    if unused := sorted(set(targets) & set(KEYS_AND_VALUES)):
        raise ReaderError(f"targets: a reader has no keys and values of its own: leave out {', '.join(unused)}")
    check_modules(model, targets)
    record(model, torch.zeros(1, 2, dtype=torch.long, device=model.device))


def check_modules(model: Any, targets: Iterable[str]) -> None:
    """Checks that the model has modules with all these names.

    Raises:
        ReaderError: a name has no module. The message lists the missing names.
    """
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if missing := sorted(set(targets) - present):
        raise ReaderError(f"the model has no modules named {', '.join(missing)}")


class _Recorded(nn.Module):
    """Stands for a layer that is not computed: returns recorded states, or its input if a later layer returns them."""

    def __init__(self, states: Tensor | None) -> None:
        super().__init__()
        self._states = states

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states if self._states is None else self._states


class _AfterText(Cache):  # type: ignore[misc]
    """Tells transformers' masks that the keys of a text come before position 0."""

    def __init__(self, before: int, layers: list["_ReadOnlyLayer"]) -> None:
        super().__init__(layers=layers)
        self._before = before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        offset: int = super().get_query_offset(layer_idx)
        return offset + self._before


class _ReadOnlyLayer(CacheLayerMixin):  # type: ignore[misc]
    """Returns recorded keys and values to a layer and ignores those that the running model computes."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, positions: int, before: int = 0) -> None:
        super().__init__()
        self.keys, self.values = keys.detach(), values.detach()
        self.is_initialized = True
        self._length: int = keys.shape[-2]
        self._positions = positions
        self._before = before  # the number of keys at negative positions

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the layer is created with its contents."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[-2] != self._positions:
            raise ReaderError(f"positions: the view is for {self._positions}, but the pass has {key_states.shape[-2]}")
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length, 0

    def get_seq_length(self) -> int:
        return self._length - self._before - self._positions

    def get_max_length(self) -> int:
        return self._length


def _after(text: Tensor, sequences: Tensor) -> Tensor:
    """Returns [B, heads, tokens, D]: the text's states, [1, heads, tokens, D], before those of each sequence."""
    return torch.cat([text.expand(len(sequences), -1, -1, -1), sequences], dim=-2)


def _decoder(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.get_decoder()


def _check_layers(config: Any, cache: PublicCache) -> None:
    expected = range(config.num_hidden_layers)
    if missing := [layer for layer in expected if layer >= len(cache.layers) or cache.get_seq_length(layer) == 0]:
        layers = ", ".join(map(str, missing)) if len(missing) < len(expected) else "all layers"
        raise ReaderError(
            f"a reader attends to the public model's keys and values, but {config.model_type} puts none into "
            f"transformers' cache in {layers}"
        )
