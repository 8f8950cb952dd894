"""Computes the gradients of rows of tokens with respect to an adapter, each a function of its own row alone.

    RowGradients(model).of(rows)    # one gradient for each row

*Claim.* The gradient of a row is a function of the row, the weights and public things: to the last bit, whatever the
other rows are, and however many. DP-SGD rests on this: a user whose text changed the rounding of the others' gradients
would move their sum, too. (In bfloat16, where passes had the width of their longest row and as many rows as fitted, by
2.2 times the clip.)

A pass of one short row waits for the overhead of its operations: some thousand small ones on a CPU, launches on a GPU.
So rows of one width share passes of a fixed shape: padded to a multiple of `_STEP` tokens, as many as fill it.

- No operation of a dense model reads another row: a row of a product of matrices is a sum over that row, attention and
  the gradient of an adapter's copy are products for each row. Kernels are chosen, and order their sums, by shapes. So
  the bits of a row follow from the row, its place in the pass, and the pass's shape. `determinism` switches off what is
  random.
- Sums whose order follows from the time at which threads arrive (a GPU's atomics) are switched off.
- Place and shape follow from the other rows, so they must not matter. `_places_are_equal` tries each shape once with
  random numbers before its first use: one row in every place, then in every other place beside other rows. The order of
  the sums does not depend on their values, so places that agree in all bits of random numbers have the same order.
  Where they do not, and for mixtures of experts, whose products have shapes that follow from all rows of a pass, each
  row has a pass of its own.
- *On a CPU* a pass of one row has the same bits, too, or no pass is shared. So rows that do not fill a pass have passes
  of their own, without padding for missing ones.
- *On a GPU* each pass has the full shape, with padding in the place of missing rows: a pass of 8,192 tokens takes as
  long as one of one row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import pad

from privmix.foundation.errors import InputError
from privmix.training.adapter import TOKENS_AT_ONCE, loss_gradient
from privmix.training.packing import IGNORED

_STEP = {"cpu": 16, "cuda": 64}
"""Rows are padded to a multiple of this number of tokens: few shapes, and little padding."""
_EAGER = 512
"""On a CPU, attention by plain products is faster than transformers' default for rows of up to so many tokens."""


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Tokens and their targets.

    Attributes:
        inputs: int64 [T].
        targets: the token after each input but the last, or `IGNORED`: int64 [T - 1].
        weight: the weight of each token's loss.
    """

    inputs: Tensor
    targets: Tensor
    weight: float


class RowGradients:
    """Computes the gradients of rows with respect to the adapter of a model from `with_lora`.

    Each place of a pass has its own copy of the adapter's weights, so PyTorch's backward pass keeps the rows' gradients
    apart, without hooks.

    Attributes:
        weights: the adapter's weights, which an optimiser may change between two calls.

    Raises:
        InputError: a module of the adapter is not a linear layer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = list(_replace_linears(model))
        self._on_gpu = model.device.type == "cuda"
        self._attention = model.config._attn_implementation
        self._mixed = any(
            "expert" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules()
        )
        self._places: dict[int, int] = {}
        self.weights = [layer.weight for layer in self._layers]

    def detach(self) -> None:
        """Stops the copying of weights, so that the model has ordinary layers."""
        self._model.set_attn_implementation(self._attention)
        for layer in self._layers:
            layer.copies = None

    def of(self, rows: Sequence[TokenRow]) -> Iterator[tuple[int, Tensor]]:
        """Yields the index of each row and its gradient, float32 [weights]: by width, else in the rows' order."""
        by_width: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            by_width.setdefault(self._width(row), []).append(index)
        for width, indices in by_width.items():
            for chosen, places in self._passes(width, indices):
                gradients = self._pass([rows[index] for index in chosen], width, places, self.weights)
                yield from zip(chosen, gradients[: len(chosen)], strict=True)

    def _passes(self, width: int, indices: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
        """Yields the indices of the rows of each pass, and its number of places."""
        places = self._places_of(width, len(indices))
        filled = len(indices) if self._on_gpu else len(indices) // places * places
        for first in range(0, filled, places):
            yield indices[first : first + places], places
        for index in indices[filled:]:
            yield [index], 1

    def _width(self, row: TokenRow) -> int:
        step = _STEP[self._model.device.type]
        return -(-len(row.inputs) // step) * step

    def _places_of(self, width: int, rows: int) -> int:
        """Returns the number of rows in a pass of this width."""
        places = TOKENS_AT_ONCE[self._model.device.type] // width
        if self._mixed or places < 2 or (rows < places and not self._on_gpu):
            return 1
        if width not in self._places:
            self._places[width] = places if self._places_are_equal(width, places) else 1
        return self._places[width]

    def _places_are_equal(self, width: int, places: int) -> bool:
        """Returns whether a row has the same bits in every place, beside itself and beside others; on a CPU, alone."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self._model.config.vocab_size, (1 + places, width), generator=generator)
        row, *others = (TokenRow(each, each[1:], 1 / width) for each in tokens)
        weights = [torch.randn(weight.shape, generator=generator).to(weight) for weight in self.weights]
        mixed = [other if place % 2 else row for place, other in enumerate(others)]
        passes = [([row] * places, places, 1), (mixed, places, 2)] + ([] if self._on_gpu else [([row], 1, 1)])
        found = [self._pass(own, width, size, weights)[::step] for own, size, step in passes]
        return all(bool((gradients == found[0][:1]).all()) for gradients in found)

    def _pass(self, rows: Sequence[TokenRow], width: int, places: int, weights: Sequence[Tensor]) -> Tensor:
        """Returns the gradients of at most `places` rows at these weights: float32 [places, weights]."""
        device = self._model.device
        missing = places - len(rows)
        inputs = torch.stack([_padded(row.inputs, width, 0) for row in rows])
        targets = torch.stack([_padded(row.targets, width - 1, IGNORED) for row in rows])
        inputs, targets = pad(inputs, (0, 0, 0, missing)), pad(targets, (0, 0, 0, missing), value=IGNORED)
        token_weights = torch.tensor([[row.weight] for row in rows] + [[0.0]] * missing)
        copies = [weight.detach().expand(places, -1, -1).clone().requires_grad_() for weight in weights]
        for layer, own in zip(self._layers, copies, strict=True):
            layer.copies = own
        self._choose_attention(width)
        with _without_atomics() if self._on_gpu else nullcontext():
            logits = self._model(input_ids=inputs.to(device), use_cache=False).logits[:, :-1]
            gradient = loss_gradient(logits.detach(), targets.to(device), token_weights.to(device))
            logits.backward(gradient)
        gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in copies]
        return torch.cat([each.flatten(1) for each in gradients], dim=1)

    def _choose_attention(self, width: int) -> None:
        chosen = "eager" if not self._on_gpu and width <= _EAGER else self._attention
        if self._model.config._attn_implementation != chosen:
            self._model.set_attn_implementation(chosen)


class _RowLinear(nn.Module):
    """A linear layer of an adapter, with a copy of its weight for each row of a pass: float32 [rows, out, in]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.copies: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.copies is None:
            return nn.functional.linear(x, self.weight)
        return x @ self.copies.transpose(1, 2)


def _replace_linears(model: Any) -> Iterator[_RowLinear]:
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            for matrices in (layer.lora_A, layer.lora_B):
                for adapter, linear in list(matrices.items()):
                    if not isinstance(linear, nn.Linear) or "bias" in dict(linear.named_parameters()):
                        raise InputError(f"targets: DP-SGD adapts linear layers, and {name} is none")
                    if linear.weight.requires_grad:
                        copied = _RowLinear(linear)
                        matrices[adapter] = copied
                        yield copied


def _padded(tokens: Tensor, size: int, filler: int) -> Tensor:
    return pad(tokens, (0, size - len(tokens)), value=filler)


@contextmanager
def _without_atomics() -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # it would write all memory twice
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
