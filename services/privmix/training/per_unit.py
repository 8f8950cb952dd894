"""Runs DP-SGD on an adapter and clips the gradient of each user, the unit of its guarantee.

A unit moves a step's sum by at most the clip, exactly: its gradient is a function of its own text and the weights, to
the last bit (`row_gradients`), and sums of clipped gradients are exact (`privmix.privacy.sampling.clipping`).
Whether a unit is in a batch does not depend on the others. Batches and noise come from the operating system's
randomness, because the guarantee does not hold against an observer who can predict them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import get_linear_schedule_with_warmup

from privmix.privacy.sampling.clipping import clipped, noised
from privmix.privacy.sampling.randomness import poisson_subsample
from privmix.training.adapter import Files, files_of, with_lora
from privmix.training.options import TrainingOptions
from privmix.training.packing import IGNORED, Tokens, even_size, pack
from privmix.training.row_gradients import RowGradients, TokenRow


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
) -> Files:
    """Fine-tunes one adapter with DP-SGD.

    The optimiser gets the noisy sum of the clipped gradients in units of the noise's standard deviation. So no divisor
    depends on the number of units.

    Args:
        base: the public model's directory.
        base_name: the public model's name in the adapter's configuration.
        units: the tokens of each user.
        seed: determines the initial weights only.
        report: called with the fraction done, 0 to 1.
        noise_multiplier: the standard deviation of the noise, divided by `clip`.
        sampling_rate: the probability with which each unit is in a batch (Poisson sampling); 1 for all units.
        clip: the maximum L2 norm of the gradient of a unit's mean loss.

    Returns:
        the files of a PEFT adapter directory.

    Raises:
        InputError: the model lacks a module in `options.targets`, or has one that is not a linear layer.
        WorkError: the weights are not finite.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = with_lora(base, base_name, options, device)
    gradients = UnitGradients(model, options.block)
    optimizer = torch.optim.AdamW(gradients.weights, lr=options.initial_rate(steps), weight_decay=options.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, steps)
    report(0.0)
    for step in range(steps):
        batch = [units[index] for index in poisson_subsample(len(units), sampling_rate)]
        total = gradients.clipped_sum(batch, clip, partial(_report_within, report, step, steps))
        gradients.assign(noised(total, noise_multiplier))
        optimizer.step()
        schedule.step()
        report((step + 1) / steps)
    gradients.detach()
    return files_of(model)


def _report_within(report: Callable[[float], None], step: int, steps: int, done: float) -> None:
    report((step + done) / steps)


class UnitGradients:
    """Computes the gradients of units with respect to the B matrices of the adapter of a model from `with_lora`.

    A stays at its initial values, so that fewer weights get noise (FFA-LoRA, Sun et al. 2024).

    Attributes:
        weights: the adapter's weights, which an optimiser may change between two calls.

    Raises:
        InputError: a module of the adapter is not a linear layer.
    """

    def __init__(self, model: Any, block: int) -> None:
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.lora_A.requires_grad_(False)
        self._block = block
        self._rows = RowGradients(model)
        self.weights = self._rows.weights

    def detach(self) -> None:
        """Stops the copying of weights, so that the model has ordinary layers."""
        self._rows.detach()

    def assign(self, gradient: Tensor) -> None:
        """Sets the gradients of the weights from one vector."""
        sizes = [weight.numel() for weight in self.weights]
        for weight, piece in zip(self.weights, torch.split(gradient, sizes), strict=True):
            weight.grad = piece.view_as(weight).to(weight)

    def clipped_sum(
        self, units: Sequence[Tokens], clip: float, report: Callable[[float], None] = lambda done: None
    ) -> Tensor:
        """Returns the sum of the units' gradients, each scaled down to an L2 norm of at most `clip`.

        A unit that is added moves it by exactly what it is for this unit alone: by at most the clip, whatever the
        others are. A gradient that is not finite counts as 0.

        Returns:
            int64 [weights], in grains of clip / `clipping.GRAINS`.
        """
        total = torch.zeros(sum(weight.numel() for weight in self.weights), dtype=torch.int64)
        for done, (_, gradient) in enumerate(self.of(units), start=1):
            total += clipped(gradient, clip)
            report(done / len(units))
        return total

    def of(self, units: Sequence[Tokens]) -> Iterator[tuple[int, Tensor]]:
        """Yields the index of each unit and the gradient of its mean loss, float32 [weights], in any order."""
        cut = [_rows(tokens, self._block) for tokens in units]
        owners = [index for index, rows in enumerate(cut) for _ in rows]
        left, sums = [len(rows) for rows in cut], dict[int, Tensor]()
        for number, gradient in self._rows.of([row for rows in cut for row in rows]):
            owner = owners[number]
            sums[owner] = sums[owner] + gradient if owner in sums else gradient
            left[owner] -= 1
            if not left[owner]:
                yield owner, sums.pop(owner)


def _rows(tokens: Tokens, block: int) -> list[TokenRow]:
    """Cuts a unit into rows of one width, at most `block`. A token has the same weight in each."""
    blocks, labels = pack(tokens, even_size(len(tokens), block))
    count = max(1, int((labels[:, 1:] != IGNORED).sum()))
    return [TokenRow(inputs, targets, 1 / count) for inputs, targets in zip(blocks, labels[:, 1:], strict=True)]
