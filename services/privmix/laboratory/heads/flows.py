"""Implements normalizing flows: distributions whose density is known at every sample.

A flow draws z from N(0, sigma^2 I) and maps it through planar layers, whose log-determinants are exact (Rezende &
Mohamed 2015).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

# The scale of the initial weights: small, so that an untrained flow is close to the identity.
_INITIAL = 0.01
# The number of halvings that find a number of 53 bits.
_HALVINGS = 60


@dataclass(frozen=True)
class FlowSettings:
    """Configures the shape of a flow.

    Attributes:
        layers: the number of layers.
        sigma: the standard deviation of the base distribution in each coordinate.
    """

    layers: int = 8
    sigma: float = 0.1


class Planar(nn.Module):
    """Stacks layers f(z) = z + u h(w^T z + b) with h = tanh. It adjusts u so that w^T u > -1, so f is invertible.

    Rezende & Mohamed 2015, equation 10 and Appendix A.1. The parameters of all layers are stacked.
    """

    def __init__(self, dimension: int, layers: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(layers, dimension) / math.sqrt(dimension))
        self.u = nn.Parameter(_INITIAL * torch.randn(layers, dimension))
        self.b = nn.Parameter(torch.zeros(layers))

    @property
    def _moved(self) -> Tensor:
        """The layers' adjusted u, [layers, D]."""
        inner = (self.w * self.u).sum(dim=1, keepdim=True)
        return self.u + (softplus(inner) - 1 - inner) * self.w / self.w.square().sum(dim=1, keepdim=True)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Maps z [S, D] to its images [S, D] and the logs of |det df/dz| [S]."""
        moved, activations = self._moved, []
        for w, u, b in zip(self.w, moved, self.b, strict=True):
            activations.append(torch.tanh(torch.addmv(b, z, w)))
            z = torch.addr(z, activations[-1], u)
        slopes = 1 - torch.stack(activations, dim=1).square()
        return z, torch.log1p(slopes * (self.w * moved).sum(dim=1)).sum(dim=1)

    def inverse(self, images: Tensor) -> Tensor:
        """Returns what is mapped to images [S, D], by bisection in each layer: w^T f(z) rises with w^T z."""
        for w, u, b in reversed([*zip(self.w, self._moved, self.b, strict=True)]):
            slope, wanted = w @ u, images @ w
            low, high = wanted - slope.abs(), wanted + slope.abs()
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                below = middle + slope * torch.tanh(middle + b) < wanted
                low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            images = images - torch.outer(torch.tanh(low + b), u)
        return images


class Flow(nn.Module):
    """Represents a distribution over vectors of a fixed dimension: a base N(0, sigma^2 I) and layers."""

    def __init__(self, dimension: int, settings: FlowSettings) -> None:
        super().__init__()
        self.dimension, self.settings = dimension, settings
        self.layers = Planar(dimension, settings.layers)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Maps base samples [S, D] to their images [S, D] and the logs of the absolute determinants [S]."""
        images: tuple[Tensor, Tensor] = self.layers(z)
        return images

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws samples [count, D]."""
        like = next(self.parameters())
        z = torch.randn(count, self.dimension, dtype=like.dtype, device=like.device, generator=generator)
        return self.forward(self.settings.sigma * z)[0]

    @torch.no_grad()
    def log_density(self, values: Tensor) -> Tensor:
        """Returns the log-density at values [S, D], [S]."""
        z, sigma = self.layers.inverse(values), self.settings.sigma
        base = -0.5 * (z / sigma).square().sum(dim=1) - self.dimension * math.log(sigma * math.sqrt(2 * math.pi))
        return base - self.forward(z)[1]
