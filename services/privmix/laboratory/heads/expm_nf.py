"""Implements ExpM+NF as published (Bridges, Tombs, Stanley 2024): a sample of a flow approximates the mechanism.

The exponential mechanism would sample model parameters theta from a density proportional to

    exp(-(epsilon / (2 s)) L(theta) - lambda |theta|),

where L is the sum of the l2 losses of all rows. Outputs and targets lie in [0, 1], so one row changes L by at most
s = 1 (Theorem 3.1). A flow is fitted to that density by the reverse Kullback-Leibler divergence, and one sample of the
flow is released. The distance between the flow and the density is unknown, so there is no guarantee: no bound is known
for what the fit reveals about the rows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from privmix.laboratory.heads.flows import Draws, Flow, FlowSettings
from privmix.laboratory.heads.models import Parametrised, squared_loss

SENSITIVITY = 1.0
"""s: the maximum change of the sum of l2 losses when one row changes."""

GUARANTEE = "none proven"

# Maps parameters [S, D] to the negative log of a density [S], up to a constant.
Energy = Callable[[Tensor], Tensor]


class FitSettings(BaseModel):
    """Configures how a flow is fitted to a density.

    Attributes:
        samples: the number of parameter vectors drawn in each step, S.
        learning_rate: the initial learning rate of RMSProp.
        decay: the factor by which the learning rate shrinks after each quarter of the steps.
        steps: the maximum number of steps.
        patience: the fit stops when the mean loss of this many steps is not below the best earlier one; 0 never stops.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: int = Field(32, ge=1)
    learning_rate: float = Field(0.01, gt=0)
    decay: float = Field(0.3, gt=0, le=1)
    steps: int = Field(600, ge=1)
    patience: int = Field(100, ge=0)


class ExpMNFSettings(BaseModel):
    """Holds the method's hyper-parameters.

    Attributes:
        flow: the shape of the flow.
        fit: how the flow is fitted.
        regulariser: lambda.
        batch: the number of rows in a step, whose loss is scaled to that of all rows; None uses all rows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    flow: FlowSettings = FlowSettings()
    fit: FitSettings = FitSettings()
    regulariser: float = Field(1e-3, ge=0)
    batch: int | None = Field(1024, ge=1)


@dataclass(frozen=True)
class Fitted:
    """Holds a fitted flow.

    Attributes:
        flow: the flow.
        losses: the loss of each step: the reverse Kullback-Leibler divergence up to the density's unknown constant.
    """

    flow: Flow
    losses: tuple[float, ...]


def reverse_kl(flow: Flow, energy: Energy, samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Estimates E_q[log q(theta) + energy(theta)], which is KL(q || p) up to a constant. It is differentiable."""
    draws = flow.draw(samples, generator)
    divergence: Tensor = torch.mean(draws.log_density + energy(draws.values))
    return divergence


def fit(
    flow: Flow,
    energy: Energy,
    settings: FitSettings,
    generator: torch.Generator | None = None,
    report: Callable[[float], None] = lambda _: None,
) -> Fitted:
    """Fits a flow to the density proportional to exp(-energy).

    Raises:
        ValueError: the loss is not finite, because the learning rate is too large.
    """
    optimizer = torch.optim.RMSprop(flow.parameters(), lr=settings.learning_rate)
    milestones = sorted({max(1, settings.steps * quarter // 4) for quarter in (1, 2, 3)})
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, settings.decay)
    losses: list[float] = []
    best, window = math.inf, settings.patience
    for step in range(settings.steps):
        optimizer.zero_grad()
        loss = reverse_kl(flow, energy, settings.samples, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise ValueError(f"learning_rate: {settings.learning_rate:g} is too large, the loss is not finite")
        if window and (step + 1) % window == 0:
            mean = sum(losses[-window:]) / window
            if mean >= best:
                break
            best = mean
        report((step + 1) / settings.steps)
    report(1.0)
    return Fitted(flow, tuple(losses))


def expm_energy(
    model: Parametrised,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    regulariser: float,
    batch: int | None = None,
    generator: torch.Generator | None = None,
) -> Energy:
    """Returns the energy (epsilon / (2 s)) L(theta) + lambda |theta| of the rows x [n, ...], y [n]."""
    scale, rows = epsilon / (2 * SENSITIVITY), len(x)
    batches = None if batch is None or batch >= rows else _batches(rows, batch, generator)

    def energy(thetas: Tensor) -> Tensor:
        if batches is None:
            total = squared_loss(model.outputs(thetas, x), y).sum(dim=1)
        else:
            chosen = next(batches)
            total = squared_loss(model.outputs(thetas, x[chosen]), y[chosen]).sum(dim=1) * (rows / len(chosen))
        length: Tensor = torch.linalg.vector_norm(thetas, dim=1)
        return scale * total + regulariser * length

    return energy


def train(
    model: Parametrised,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    settings: ExpMNFSettings,
    seed: int,
    report: Callable[[float], None] = lambda _: None,
) -> Fitted:
    """Fits a flow to the exponential mechanism's density of the model's parameters. Each sample is one release."""
    torch.manual_seed(seed)
    generator = torch.Generator(x.device).manual_seed(seed)
    flow = Flow(model.dimension, settings.flow).to(x)
    energy = expm_energy(model, x, y, epsilon, settings.regulariser, settings.batch, generator)
    return fit(flow, energy, settings.fit, generator, report)


@torch.no_grad()
def release(fitted: Fitted, count: int = 1, seed: int | None = None) -> Draws:
    """Draws parameter vectors [count, D] with their densities under the flow. Each vector is a separate release."""
    like = next(fitted.flow.parameters())
    generator = torch.Generator(like.device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return fitted.flow.draw(count, generator)


def _batches(rows: int, batch: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    while True:
        yield from torch.split(torch.randperm(rows, generator=generator), batch)
