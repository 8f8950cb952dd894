"""Implements the baselines of ExpM+NF: training without privacy, and DP-SGD (Abadi et al. 2016)."""

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache

import torch
from pydantic import BaseModel, ConfigDict, Field
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from privmix.foundation.units import MIN_CLIP
from privmix.laboratory.heads.row_function import RowFunction
from privmix.privacy.sampling.clipping import clipped, noised
from privmix.privacy.sampling.randomness import poisson_subsample

_FINEST = 0.05
_SMALLEST = 1e-6  # the distance of outputs from 0 and 1 before taking logarithms


class SgdSettings(BaseModel):
    """Configures training without privacy.

    Attributes:
        learning_rate: the learning rate of RMSProp.
        epochs: the number of passes over the rows.
        batch: the number of rows in a step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = Field(0.01, gt=0)
    epochs: int = Field(10, ge=1)
    batch: int = Field(256, ge=1)


class HeadDpSgdSettings(SgdSettings):
    """Configures DP-SGD, which clips the gradient of each row to an L2 norm and adds noise."""

    learning_rate: float = Field(0.5, gt=0, description="of plain SGD")
    clip: float = Field(1.0, ge=MIN_CLIP)
    batch: int = Field(1024, ge=1, description="average number of rows in a step; all rows if at least their number")


@dataclass(frozen=True)
class Noise:
    """Holds the noise of a DP-SGD training and its cost.

    Attributes:
        multiplier: the standard deviation of the noise, divided by the clipping norm.
        rate: the probability with which a row is in a batch.
        steps: the number of steps.
        epsilon: an upper bound of their cost at the requested delta.
        accountant: the method that computed the cost.
        batch: the expected number of rows in a step, by which a step divides.
    """

    multiplier: float
    rate: float
    steps: int
    epsilon: float
    accountant: str
    batch: float


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


def train_privately(model: nn.Module, x: Tensor, y: Tensor, noise: Noise, settings: HeadDpSgdSettings) -> nn.Module:
    """Trains the model in place with DP-SGD.

    A row moves the sum of clipped gradients by at most the clip, exactly: its gradient does not depend on the rows
    beside it (`RowFunction`), and sums are exact (`privmix.privacy.sampling.clipping`). Batches and noise come
    from the operating system's randomness, also in comparisons: PyTorch's generator on the CPU takes 32 bits of a seed,
    so its noise can be found by search, and then the gradients.
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
    for _ in range(noise.steps):
        chosen = list(poisson_subsample(len(x), noise.rate))
        total = function(x[chosen], y[chosen]).sum(dim=0)
        step = noised(total, noise.multiplier) * (noise.multiplier * settings.clip / noise.batch)
        for weight, piece in zip(model.parameters(), torch.split(step, sizes), strict=True):
            weight.grad = piece.view_as(weight).to(weight)
        optimizer.step()
    return model


@lru_cache(maxsize=256)
def noise_for(epsilon: float, delta: float, population: int, batch: int, epochs: int) -> Noise:
    """Returns the smallest noise that meets (epsilon, delta) for one row added or removed.

    The rate, the steps and the divisor of a step follow from `population`, the number of rows that the operator states.
    Taken from the table, they would tell whether a row is in it.

    Opacus' PRV accountant computes the cost of Poisson batches (Gopi, Lee, Wutschitz 2021). If a batch contains all
    rows, the steps are one Gaussian mechanism with an exact cost (Balle & Wang 2018). Below `_FINEST`, where the
    accountant's grid of privacy losses would not fit into memory, every batch contains all rows.

    Raises:
        ValueError: no noise meets (epsilon, delta).
    """
    rate = 1.0 if epsilon < _FINEST else min(1.0, batch / population)
    steps = math.ceil(epochs / rate)
    if rate == 1.0:
        multiplier = math.sqrt(steps) / brentq(lambda mu: _gaussian_delta(mu, epsilon) - delta, 1e-9, 100.0)
        multiplier *= 1 + 1e-6
        return Noise(
            multiplier, rate, steps, epsilon, "Gaussian mechanism, exact (Balle & Wang 2018)", float(population)
        )
    from opacus.accountants import PRVAccountant
    from opacus.accountants.utils import get_noise_multiplier

    # The resolution of the privacy loss grid follows from epsilon.
    error = min(0.01, epsilon / 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        multiplier = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant="prv",
            epsilon_tolerance=error,
            eps_error=error,
        )
        accountant = PRVAccountant()
        accountant.history = [(multiplier, rate, steps)]
        cost = float(accountant.get_epsilon(delta, eps_error=error))
    return Noise(multiplier, rate, steps, cost, "PRV (Gopi, Lee, Wutschitz 2021), Opacus", rate * population)


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """Returns delta(epsilon) of a Gaussian mechanism with sensitivity mu sigma (Balle & Wang 2018, Theorem 8)."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy."""
    return nn.functional.binary_cross_entropy(outputs.clamp(_SMALLEST, 1 - _SMALLEST), targets)
