"""Implements the baselines of ExpM+NF: training without privacy, and DP-SGD (Abadi et al. 2016)."""

import math
import uuid
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from privmix.laboratory.heads.row_function import RowFunction
from privmix.privacy.protocols.dp_sgd import DpSgdEvent, noise_multiplier
from privmix.privacy.sampling.clipping import clipped, noised
from privmix.privacy.sampling.randomness import poisson_subsample

_FINEST = 0.05
_SMALLEST = 1e-6  # the distance of outputs from 0 and 1 before taking logarithms


@dataclass(frozen=True)
class SgdSettings:
    """Configures training without privacy.

    Attributes:
        learning_rate: the learning rate of RMSProp.
        epochs: the number of passes over the rows.
        batch: the number of rows in a step.
    """

    learning_rate: float = 0.01
    epochs: int = 10
    batch: int = 256


@dataclass(frozen=True)
class HeadDpSgdSettings(SgdSettings):
    """Configures DP-SGD, which clips the gradient of each row to an L2 norm and adds noise.

    Attributes:
        learning_rate: that of plain SGD.
        batch: the average number of rows in a step; all rows if it is at least their number.
    """

    learning_rate: float = 0.5
    clip: float = 1.0
    batch: int = 1024


def train(model: nn.Module, x: Tensor, y: Tensor, settings: SgdSettings, seed: int) -> nn.Module:
    """Trains the model in place, without privacy."""
    torch.manual_seed(seed)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=settings.learning_rate)
    for _ in range(settings.epochs):
        for batch in torch.split(torch.randperm(len(x)), settings.batch):
            optimizer.zero_grad()
            _loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def train_privately(
    model: nn.Module, x: Tensor, y: Tensor, event: DpSgdEvent, batch: float, settings: HeadDpSgdSettings
) -> nn.Module:
    """Trains the model in place with DP-SGD, by the rate, the noise and the steps of an event.

    A row moves the sum of clipped gradients by at most the clip, exactly: its gradient does not depend on the rows
    beside it (`RowFunction`), and sums are exact (`privmix.privacy.sampling.clipping`). Batches and noise come
    from the operating system's randomness, also in comparisons: PyTorch's generator on the CPU takes 32 bits of a seed,
    so its noise can be found by search, and then the gradients.

    Args:
        batch: the expected number of rows in a step, by which a step divides.
    """
    weights = {name: weight.detach() for name, weight in model.named_parameters()}  # the optimiser's own memory
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate)

    def loss(named: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        return _loss(functional_call(model, named, (row[None],)), target[None])

    gradients_of = vmap(grad(loss), in_dims=(None, 0, 0))

    def clipped_gradients(rows: Tensor, targets: Tensor) -> Tensor:
        gradients = gradients_of(weights, rows, targets)
        return clipped(torch.cat([each.flatten(1) for each in gradients.values()], dim=1), settings.clip)

    function = RowFunction(clipped_gradients, x, y)
    sizes = [weight.numel() for weight in weights.values()]
    for _ in range(event.steps):
        chosen = list(poisson_subsample(len(x), event.sampling_rate))
        total = function(x[chosen], y[chosen]).sum(dim=0)
        step = noised(total, event.noise_multiplier) * (event.noise_multiplier * settings.clip / batch)
        for weight, piece in zip(model.parameters(), torch.split(step, sizes), strict=True):
            weight.grad = piece.view_as(weight).to(weight)
        optimizer.step()
    return model


def event_for(epsilon: float, delta: float, population: int, settings: HeadDpSgdSettings) -> DpSgdEvent:
    """Returns the event of a training that meets (epsilon, delta) for one row added or removed.

    The rate and the steps follow from `population`, the number of rows that the operator states. Taken from the table,
    they would tell whether a row is in it. Below `_FINEST`, where the grid of privacy losses would not fit into
    memory, every batch contains all rows.

    Raises:
        ValueError: no noise meets (epsilon, delta).
    """
    rate = 1.0 if epsilon < _FINEST else min(1.0, settings.batch / population)
    steps = math.ceil(settings.epochs / rate)
    return DpSgdEvent("record", _noise(epsilon, delta, rate, steps), rate, steps, uuid.uuid4().hex)


_noise = lru_cache(maxsize=256)(noise_multiplier)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy."""
    return nn.functional.binary_cross_entropy(outputs.clamp(_SMALLEST, 1 - _SMALLEST), targets)
