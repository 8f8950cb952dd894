"""What ExpM+NF is compared with: training without privacy, and DP-SGD (Abadi et al. 2016) with Opacus."""

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn

Loss = Literal["l2", "cross-entropy"]

_FINEST = 0.05
_SMALLEST = 1e-6  # outputs are kept this far from 0 and 1 where their logarithm is taken


class SgdSettings(BaseModel):
    """How a model is trained without privacy.

    Attributes:
        loss: what is minimised; both are means over a batch.
        learning_rate: of RMSProp.
        epochs: times the rows are gone through.
        batch: rows a step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: Loss = "cross-entropy"
    learning_rate: float = Field(0.01, gt=0)
    epochs: int = Field(10, ge=1)
    batch: int = Field(256, ge=1)


class DpSgdSettings(SgdSettings):
    """How a model is trained with DP-SGD: each row's gradient is clipped to a length, and noise is added."""

    learning_rate: float = Field(0.5, gt=0, description="of plain SGD")
    clip: float = Field(1.0, gt=0)
    batch: int = Field(1024, ge=1, description="rows a step, on average; at least as many as there are takes all")


@dataclass(frozen=True)
class Noise:
    """What a DP-SGD training adds to its gradients, and what it costs.

    Attributes:
        multiplier: the noise's standard deviation in clipping lengths.
        rate: the probability with which a row is in a batch.
        steps: how many there are.
        epsilon: what they cost at the delta asked for, at most.
        accountant: what computed it.
    """

    multiplier: float
    rate: float
    steps: int
    epsilon: float
    accountant: str


def train(model: nn.Module, x: Tensor, y: Tensor, settings: SgdSettings, seed: int) -> nn.Module:
    """Train in place, without privacy."""
    torch.manual_seed(seed)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=settings.learning_rate)
    for _ in range(settings.epochs):
        for batch in torch.split(torch.randperm(len(x)), settings.batch):
            optimizer.zero_grad()
            _loss(model(x[batch]), y[batch], settings.loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def train_privately(
    model: nn.Module, x: Tensor, y: Tensor, noise: Noise, settings: DpSgdSettings, seed: int | None = None
) -> nn.Module:
    """Train with Opacus; a seed makes the noise predictable, and is for comparisons alone.

    Returns:
        the model, without Opacus' wrapper.
    """
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(
            torch.optim.SGD(wrapped.parameters(), lr=settings.learning_rate),
            noise_multiplier=noise.multiplier,
            max_grad_norm=settings.clip,
            expected_batch_size=max(1.0, noise.rate * len(x)),
            generator=generator,
            secure_mode=False,
        )
        for _ in range(noise.steps):
            chosen = torch.rand(len(x), generator=generator) < noise.rate
            optimizer.zero_grad()
            if bool(chosen.any()):
                _loss(wrapped(x[chosen]), y[chosen], settings.loss).backward()  # type: ignore[no-untyped-call]
            else:  # noise is added to an empty batch, too
                for parameter in wrapped.parameters():
                    parameter.grad_sample = torch.zeros(0, *parameter.shape)
            optimizer.step()
    wrapped.remove_hooks()
    return model


@lru_cache(maxsize=256)
def noise_for(epsilon: float, delta: float, rows: int, batch: int, epochs: int) -> Noise:
    """The least noise that keeps to (epsilon, delta), one row added or removed.

    Poisson batches are accounted for by Opacus' PRV accountant (Gopi, Lee, Wutschitz 2021). Where a batch takes all
    rows, the steps are one Gaussian mechanism, whose cost is known exactly (Balle & Wang 2018); below `_FINEST`, where
    the accountant's grid of privacy losses would not fit into memory, every batch does.

    Raises:
        ValueError: no noise keeps to it.
    """
    rate = 1.0 if epsilon < _FINEST else min(1.0, batch / rows)
    steps = math.ceil(epochs / rate)
    if rate == 1.0:
        multiplier = math.sqrt(steps) / brentq(lambda mu: _gaussian_delta(mu, epsilon) - delta, 1e-9, 100.0)
        multiplier *= 1 + 1e-6
        return Noise(multiplier, rate, steps, epsilon, "Gaussian mechanism, exact (Balle & Wang 2018)")
    from opacus.accountants import PRVAccountant
    from opacus.accountants.utils import get_noise_multiplier

    # The grid of privacy losses is as fine as the epsilon asked for.
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
    return Noise(multiplier, rate, steps, cost, "PRV (Gopi, Lee, Wutschitz 2021), Opacus")


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """delta(epsilon) of a Gaussian mechanism of sensitivity mu standard deviations (Balle & Wang 2018, Theorem 8)."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def _loss(outputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    if loss == "l2":
        return (outputs - targets).square().mean()
    return nn.functional.binary_cross_entropy(outputs.clamp(_SMALLEST, 1 - _SMALLEST), targets)
