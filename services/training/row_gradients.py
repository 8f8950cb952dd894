"""Computes the gradients of rows of tokens with respect to an adapter, each a function of its own row alone.

    RowGradients(model).of(rows)    # one gradient for each row

*Claim.* The gradient of a row is a function of the row, the weights and public things: to the last bit, whatever the
other rows are, and however many. DP-SGD rests on this: a user whose text changed the rounding of the others' gradients
would move their sum, too. (In bfloat16, where passes had the width of their longest row and as many rows as fitted, by
2.2 times the clip.)

*On a CPU* a row has a pass of its own, of its own length. So no other row is an operand.

*On a GPU* a pass of one row would wait for its launches (a pass of 8,192 tokens takes as long). There a pass has a
fixed shape: rows padded to a multiple of `_STEP` tokens, and as many of them as fill it; what is missing is padding.

- No operation of a dense model reads another row: a row of a product of matrices is a sum over that row, attention and
  the gradient of an adapter's copy are products for each row. Kernels are chosen, and order their sums, by shapes. So
  the bits of a row follow from the row and its place in the pass.
- Sums whose order follows from the time at which threads arrive (atomics) are switched off.
- The place follows from the other rows, so it must not matter. `_places_are_equal` tries each shape once with random
  numbers before its first use: one row in every place, then in every other place beside other rows. The order of the
  sums does not depend on their values, so places that agree in all bits of random numbers have the same order. Where
  they do not, and for mixtures of experts, whose products have shapes that follow from all rows of a pass, each row
  has a pass of its own.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from services.errors import InputError
from services.training.adapter import SHORT_BLOCK, TOKENS_AT_ONCE, loss_gradient
from services.training.packing import IGNORED

_STEP = 64
"""The rows of a GPU's pass are padded to a multiple of this number of tokens: few shapes, and little padding."""


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Tokens and their targets.

    Attributes:
        inputs: int64 [T].
        targets: the token after each input but the last, or `IGNORED`: int64 [T - 1].
        share: the weight of each token's loss.
    """

    inputs: Tensor
    targets: Tensor
    share: float


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
        self._mixed = any("expert" in name for name, _ in model.named_modules())
        self._places: dict[int, int] = {}
        self.weights = [layer.weight for layer in self._layers]
        if self._on_gpu:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, sums of cuBLAS may vary

    def detach(self) -> None:
        """Stops the copying of weights, so that the model has ordinary layers."""
        for layer in self._layers:
            layer.copies = None

    def of(self, rows: Sequence[TokenRow]) -> Iterator[tuple[int, Tensor]]:
        """Yields the index of each row and its gradient, float32 [weights]: by width, else in the rows' order."""
        by_width: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            by_width.setdefault(self._width(row), []).append(index)
        for width, indices in by_width.items():
            places = self._places_of(width)
            for first in range(0, len(indices), places):
                chosen = indices[first : first + places]
                gradients = self._pass([rows[index] for index in chosen], width, places, self.weights)
                yield from zip(chosen, gradients[: len(chosen)], strict=True)

    def _width(self, row: TokenRow) -> int:
        size = len(row.inputs)
        return -(-size // _STEP) * _STEP if self._on_gpu else size

    def _places_of(self, width: int) -> int:
        """Returns the number of rows in a pass of this width."""
        if not self._on_gpu or self._mixed:
            return 1
        if width not in self._places:
            places = max(1, TOKENS_AT_ONCE["cuda"] // width)
            self._places[width] = places if self._places_are_equal(width, places) else 1
        return self._places[width]

    def _places_are_equal(self, width: int, places: int) -> bool:
        """Returns whether a row has the same bits in every place of a pass, beside itself and beside other rows."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self._model.config.vocab_size, (1 + places, width), generator=generator)
        row, *others = (TokenRow(each, each[1:], 1 / width) for each in tokens)
        weights = [torch.randn(weight.shape, generator=generator).to(weight) for weight in self.weights]
        mixed = [other if place % 2 else row for place, other in enumerate(others)]
        alike = self._pass([row] * places, width, places, weights)
        beside = self._pass(mixed, width, places, weights)
        return bool((alike == alike[:1]).all()) and bool((beside[::2] == alike[:1]).all())

    def _pass(self, rows: Sequence[TokenRow], width: int, places: int, weights: Sequence[Tensor]) -> Tensor:
        """Returns the gradients of at most `places` rows at these weights: float32 [places, weights]."""
        device = self._model.device
        missing = places - len(rows)
        inputs = torch.stack([_padded(row.inputs, width, 0) for row in rows])
        targets = torch.stack([_padded(row.targets, width - 1, IGNORED) for row in rows])
        inputs, targets = pad(inputs, (0, 0, 0, missing)), pad(targets, (0, 0, 0, missing), value=IGNORED)
        shares = torch.tensor([[row.share] for row in rows] + [[0.0]] * missing)
        copies = [weight.detach().expand(places, -1, -1).clone().requires_grad_() for weight in weights]
        for layer, own in zip(self._layers, copies, strict=True):
            layer.copies = own
        with _without_atomics() if self._on_gpu else nullcontext(), _attention(device, width):
            logits = self._model(input_ids=inputs.to(device), use_cache=False).logits[:, :-1]
            gradient = loss_gradient(logits.detach(), targets.to(device), shares.to(device))
            logits.backward(gradient)
        gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in copies]
        return torch.cat([each.flatten(1) for each in gradients], dim=1)


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


def _attention(device: torch.device, width: int) -> Any:
    """Returns the context of a pass: on a CPU, short rows are faster with plain products."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" and width <= SHORT_BLOCK else nullcontext()


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
