"""Runs DP-SGD on an adapter and clips the gradient of each unit: a record or a whole user.

A unit of at least one pass of `TOKENS_AT_ONCE` tokens accumulates its gradient over passes of its own. Shorter units
share a pass: each has its own copy of the adapter's weights there, so PyTorch's backward pass keeps their gradients
apart, without hooks. Batches and noise come from the operating system's randomness, because the guarantee does not
hold against an observer who can predict them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import get_linear_schedule_with_warmup

from services.errors import InputError
from services.privacy.sampling.randomness import normal, poisson_subsample
from services.training.adapter import TOKENS_AT_ONCE, Files, files_of, loss_gradient, with_lora
from services.training.options import Matrices, TrainingOptions
from services.training.packing import IGNORED, Tokens, even_size, pack

_PUBLIC_BATCH = 8
"""The number of public texts in a step of a warm start."""


def train_adapter(
    base: Path,
    base_name: str,
    units: Sequence[Tokens],
    options: TrainingOptions,
    seed: int,
    report: Callable[[float], None],
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    clip: float,
    matrices: Matrices = "b",
    public: Sequence[Tokens] = (),
) -> Files:
    """Fine-tunes one adapter with DP-SGD.

    The optimiser gets the noisy sum of the clipped gradients in units of the noise's standard deviation. So no divisor
    depends on the number of units.

    Args:
        base: the public model's directory.
        base_name: the public model's name in the adapter's configuration.
        units: the tokens of each record or user.
        seed: determines the initial weights only.
        report: called with the fraction done, 0 to 1.
        noise_multiplier: the standard deviation of the noise, divided by `clip`.
        sampling_rate: the probability with which each unit is in a batch (Poisson sampling); 1 for all units.
        clip: the maximum L2 norm of the gradient of a unit's mean loss.
        matrices: the matrices of LoRA to train. With "b", A stays at its initial values.
        public: texts of no private unit, on which the adapter is trained first, without noise.

    Returns:
        the files of a PEFT adapter directory.

    Raises:
        InputError: the model lacks a module in `options.targets`, or has one that is not a linear layer.
        WorkError: the weights are not finite.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = with_lora(base, base_name, options, device)
    gradients = UnitGradients(model, options.block, matrices)
    if public:
        _begin_with(public, gradients, options)
    optimizer = torch.optim.AdamW(gradients.weights, lr=options.initial_rate(steps), weight_decay=options.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, round(options.warm_up * steps), steps)
    model.train()
    report(0.0)
    for step in range(steps):
        batch = [units[index] for index in poisson_subsample(len(units), sampling_rate)]
        total = gradients.clipped_sum(batch, clip, partial(_report_within, report, step, steps))
        noisy = noised(total, noise_multiplier * clip) / (noise_multiplier * clip)
        gradients.assign(noisy)
        optimizer.step()
        schedule.step()
        report((step + 1) / steps)
    gradients.detach()
    _unfreeze(model)  # so that the files have A too
    return files_of(model)


def _begin_with(public: Sequence[Tokens], gradients: "UnitGradients", options: TrainingOptions) -> None:
    """Trains on public texts, in their order, once. The optimiser of DP-SGD begins anew after it."""
    batches = [public[first : first + _PUBLIC_BATCH] for first in range(0, len(public), _PUBLIC_BATCH)]
    optimizer = torch.optim.AdamW(
        gradients.weights, lr=options.initial_rate(len(batches)), weight_decay=options.weight_decay
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(batches))
    for batch in batches:
        gradients.assign(gradients.of(batch).mean(dim=0))
        optimizer.step()
        schedule.step()


def noised(total: Tensor, deviation: float) -> Tensor:
    """Adds Gaussian noise with this standard deviation, from the operating system's randomness, to each coordinate.

    The noise is in floating point: its lowest bits could leak (Mironov 2012) to an observer of the noisy sums, or of
    all weights, of every step.
    """
    return total + torch.from_numpy(normal(total.numel())).to(total) * deviation


def _report_within(report: Callable[[float], None], step: int, steps: int, done: float) -> None:
    report((step + done) / steps)


class UnitGradients:
    """Computes the gradients of units with respect to the adapter of a model from `with_lora`.

    Attributes:
        weights: the adapter's weights, which an optimiser may change between two calls.

    Raises:
        InputError: a module of the adapter is not a linear layer.
    """

    def __init__(self, model: Any, block: int, matrices: Matrices = "both") -> None:
        self._model, self._block = model, block
        if matrices == "b":
            _freeze_a(model)
        self._layers = list(_replace_linears(model))
        self.weights = [layer.weight for layer in self._layers]

    def detach(self) -> None:
        """Stops the copying of weights, so that the model has ordinary layers."""
        for layer in self._layers:
            layer.copies = None

    def assign(self, gradient: Tensor) -> None:
        """Sets the gradients of the weights from one vector."""
        sizes = [weight.numel() for weight in self.weights]
        for weight, piece in zip(self.weights, torch.split(gradient, sizes), strict=True):
            weight.grad = piece.view_as(weight).to(weight)

    def clipped_sum(
        self, units: Sequence[Tokens], clip: float, report: Callable[[float], None] = lambda done: None
    ) -> Tensor:
        """Returns the sum of the units' gradients, each scaled down to an L2 norm of at most `clip`: float64 [weights].

        A gradient that is not finite counts as 0: an error would reveal that its unit is there.
        """
        total = torch.zeros(sum(weight.numel() for weight in self.weights), dtype=torch.float64)
        done = 0
        for group in _groups(units, TOKENS_AT_ONCE[self._model.device.type]):
            gradients = self.of(group).double().cpu()
            gradients[~gradients.isfinite().all(dim=1)] = 0.0
            scales = (clip / gradients.norm(dim=1)).clamp(max=1.0)
            total += scales @ gradients
            done += len(group)
            report(done / len(units))
        return total

    def of(self, units: Sequence[Tokens]) -> Tensor:
        """Returns the gradient of each unit's mean loss: float32 [units, weights]."""
        copies = [layer.weight.detach().expand(len(units), -1, -1).clone().requires_grad_() for layer in self._layers]
        for layer, own in zip(self._layers, copies, strict=True):
            layer.copies = own
        for inputs, targets, owners, shares in self._passes(units):
            for layer in self._layers:
                layer.owners = owners
            logits = self._model(input_ids=inputs, use_cache=False).logits[:, :-1]
            logits.backward(loss_gradient(logits.detach(), targets, shares[:, None]))
        gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in copies]
        return torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)

    def _passes(self, units: Sequence[Tokens]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yields, for each pass: inputs, int64 [rows, T]; targets, [rows, T - 1]; the unit of each row; and the weight
        of a row's tokens in the mean loss of its unit."""
        device = self._model.device
        packed = [pack(tokens, even_size(len(tokens), self._block)) for tokens in units]
        width = max(inputs.shape[1] for inputs, _ in packed)
        inputs, labels = (
            torch.cat([pad(blocks, (0, width - blocks.shape[1]), value=filler) for blocks in side])
            for side, filler in zip(zip(*packed, strict=True), (0, IGNORED), strict=True)
        )
        targets = labels[:, 1:]
        owners = torch.tensor([unit for unit, (blocks, _) in enumerate(packed) for _ in blocks])
        counts = torch.zeros(len(units), dtype=torch.int64).index_add_(0, owners, (targets != IGNORED).sum(dim=1))
        shares = 1 / counts.clamp(min=1)[owners]
        rows = max(1, TOKENS_AT_ONCE[device.type] // width)
        for tensors in zip(*(torch.split(tensor, rows) for tensor in (inputs, targets, owners, shares)), strict=True):
            first, second, third, fourth = (tensor.to(device) for tensor in tensors)
            yield first, second, third, fourth


class _UnitLinear(nn.Module):
    """A linear layer of an adapter, with a copy of its weight for each unit of a pass: float32 [units, out, in]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.copies: Tensor | None = None
        self.owners: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.copies is None:
            return nn.functional.linear(x, self.weight)
        return x @ self.copies[self.owners].transpose(1, 2)


def _freeze_a(model: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.lora_A.requires_grad_(False)


def _unfreeze(model: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.lora_A.requires_grad_(True)


def _replace_linears(model: Any) -> Iterator[_UnitLinear]:
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            for matrices in (layer.lora_A, layer.lora_B):
                for adapter, linear in list(matrices.items()):
                    if not isinstance(linear, nn.Linear) or "bias" in dict(linear.named_parameters()):
                        raise InputError(f"targets: DP-SGD adapts linear layers, and {name} is none")
                    if linear.weight.requires_grad:
                        copied = _UnitLinear(linear)
                        matrices[adapter] = copied
                        yield copied


def _groups(units: Sequence[Tokens], tokens: int) -> Iterator[list[Tokens]]:
    """Yields groups of units of similar length that fill one pass. A longer unit is a group by itself."""
    group: list[Tokens] = []
    for unit in sorted(units, key=len):  # so a group's longest unit is the last
        if group and (len(group) + 1) * len(unit) > tokens:
            yield group
            group = []
        group.append(unit)
    if group:
        yield group
