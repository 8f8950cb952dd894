"""Implements ExpM+NF as published (Bridges, Tombs, Stanley 2024): a sample of a flow approximates the mechanism.

The exponential mechanism would sample model parameters theta from a density proportional to

    exp(-(epsilon / (2 s)) L(theta) - lambda |theta|),

where L is the sum of the l2 losses of all rows. Outputs and targets lie in [0, 1], so one row changes L by at most
s = 1 (Theorem 3.1). A flow is fitted to that density by the reverse Kullback-Leibler divergence, and one sample of the
flow is released. The distance between the flow and the density is unknown, so there is no guarantee: no bound is known
for what the fit reveals about the rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from privmix.laboratory.heads.flows import Flow, FlowSettings
from privmix.laboratory.heads.models import Parametrised, squared_loss

SENSITIVITY = 1.0
"""s: the maximum change of the sum of l2 losses when one row changes."""

# Maps parameters [S, D] to the negative log of a density [S], up to a constant.
Energy = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FitSettings:
    """Configures how a flow is fitted to a density.

    Attributes:
        samples: the number of parameter vectors drawn in each step, S.
        learning_rate: the initial learning rate of RMSProp.
        decay: the factor by which the learning rate shrinks after each quarter of the steps.
        steps: the number of steps.
    """

    samples: int = 32
    learning_rate: float = 0.01
    decay: float = 0.3
    steps: int = 600


@dataclass(frozen=True)
class ExpMNFSettings:
    """Holds the method's hyper-parameters.

    Attributes:
        flow: the shape of the flow.
        fit: how the flow is fitted.
        regulariser: lambda.
        batch: the number of rows in a step, whose loss is scaled to that of all rows; None uses all rows.
    """

    flow: FlowSettings
    fit: FitSettings
    regulariser: float = 1e-3
    batch: int | None = 1024


def fit(flows: Sequence[Flow], energy: Energy, settings: FitSettings, generator: torch.Generator | None = None) -> None:
    """Fits each of several flows of one shape to the density proportional to exp(-energy), in place.

    The loss of a flow is E_q[log q(theta) + energy(theta)], the reverse Kullback-Leibler divergence up to a constant.
    The sum over flows gives each of them the gradient and the RMSProp step of a separate fit.

    Raises:
        ValueError: the loss is not finite, because the learning rate is too large.
    """
    skeleton, own = flows[0], next(flows[0].parameters())
    parameters, buffers = stack_module_state(list(flows))
    images = vmap(lambda weights, constants, z: functional_call(skeleton, (weights, constants), (z,)))
    optimizer = torch.optim.RMSprop(parameters.values(), lr=settings.learning_rate)
    milestones = sorted({max(1, settings.steps * quarter // 4) for quarter in (1, 2, 3)})
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, settings.decay)
    shape = len(flows), settings.samples, skeleton.dimension
    for _ in range(settings.steps):
        optimizer.zero_grad()
        z = skeleton.settings.sigma * torch.randn(shape, generator=generator, dtype=own.dtype, device=own.device)
        values, log_determinants = images(parameters, buffers, z)
        loss = (energy(values.flatten(0, 1)) - log_determinants.flatten()).sum() / settings.samples
        if not torch.isfinite(loss):
            raise ValueError(f"learning_rate: {settings.learning_rate:g} is too large, the loss is not finite")
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        for index, flow in enumerate(flows):
            for name, weight in flow.named_parameters():
                weight.copy_(parameters[name][index])


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


def train(model: Parametrised, x: Tensor, y: Tensor, epsilon: float, settings: ExpMNFSettings, seed: int) -> Flow:
    """Fits a flow to the exponential mechanism's density of the model's parameters. Each sample is one release."""
    torch.manual_seed(seed)
    generator = torch.Generator(x.device).manual_seed(seed)
    flow = Flow(model.dimension, settings.flow).to(x)
    energy = expm_energy(model, x, y, epsilon, settings.regulariser, settings.batch, generator)
    fit([flow], energy, settings.fit, generator)
    return flow


@torch.no_grad()
def release(flow: Flow, count: int = 1, seed: int | None = None) -> Tensor:
    """Draws parameter vectors [count, D]. Each vector is a separate release."""
    generator = torch.Generator(next(flow.parameters()).device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return flow.draw(count, generator)


def _batches(rows: int, batch: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    while True:
        yield from torch.split(torch.randperm(rows, generator=generator), batch)
