"""Implements normalizing flows: distributions whose density is known at every sample.

A flow draws z from N(0, sigma^2 I) and maps it through layers whose log-determinants are exact: planar layers (Rezende
& Mohamed 2015) and Sylvester layers with a Q made of Householder reflections (van den Berg et al. 2018).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.functional import softplus

FlowKind = Literal["planar", "sylvester"]

# The scale of the initial weights: small, so that an untrained flow is close to the identity.
_INITIAL = 0.01


class FlowSettings(BaseModel):
    """Configures the shape of a flow.

    Attributes:
        kind: the kind of the layers.
        layers: the number of layers.
        sigma: the standard deviation of the base distribution in each coordinate.
        rank: M of Sylvester layers, the number of directions that a layer bends; at most the dimension.
        reflections: the number of Householder reflections whose product is Q, for Sylvester layers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FlowKind = "planar"
    layers: int = Field(8, ge=1)
    sigma: float = Field(0.1, gt=0)
    rank: int = Field(8, ge=1)
    reflections: int = Field(8, ge=1)


@dataclass(frozen=True)
class Draws:
    """Holds samples of a flow.

    Attributes:
        values: [S, D].
        log_density: the log density of the flow at each value, [S].
    """

    values: Tensor
    log_density: Tensor


class Planar(nn.Module):
    """Stacks layers f(z) = z + u h(w^T z + b) with h = tanh. It adjusts u so that w^T u > -1, so f is invertible.

    Rezende & Mohamed 2015, equation 10 and Appendix A.1. The parameters of all layers are stacked.
    """

    def __init__(self, dimension: int, layers: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(layers, dimension) / math.sqrt(dimension))
        self.u = nn.Parameter(_INITIAL * torch.randn(layers, dimension))
        self.b = nn.Parameter(torch.zeros(layers))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Maps z [S, D] to its images [S, D] and the logs of |det df/dz| [S]."""
        inner = (self.w * self.u).sum(dim=1, keepdim=True)
        moved = self.u + (softplus(inner) - 1 - inner) * self.w / self.w.square().sum(dim=1, keepdim=True)
        activations = []
        for w, u, b in zip(self.w, moved, self.b, strict=True):
            activations.append(torch.tanh(torch.addmv(b, z, w)))
            z = torch.addr(z, activations[-1], u)
        slopes = 1 - torch.stack(activations, dim=1).square()
        return z, torch.log1p(slopes * (self.w * moved).sum(dim=1)).sum(dim=1)


class Sylvester(nn.Module):
    """Stacks layers f(z) = z + Q R1 h(R2 Q^T z + c) with h = tanh, Q [D, M] orthonormal, R1 and R2 upper triangular.

    By Sylvester's identity the determinant equals that of an M x M triangular matrix: the product of
    1 + h' r1_ii r2_ii. The diagonals stay in (-1, 1), so every factor is positive (van den Berg et al. 2018,
    Theorem 2). Q is the first M columns of a product of Householder reflections.
    """

    _upper: Tensor

    def __init__(self, dimension: int, layers: int, rank: int, reflections: int) -> None:
        super().__init__()
        rank = min(rank, dimension)
        self.v = nn.Parameter(torch.randn(layers, reflections, dimension))
        self.r1, self.r2 = (nn.Parameter(_INITIAL * torch.randn(layers, rank, rank)) for _ in range(2))
        self.d1, self.d2 = (nn.Parameter(_INITIAL * torch.randn(layers, rank)) for _ in range(2))
        self.c = nn.Parameter(torch.zeros(layers, rank))
        self.register_buffer("_upper", torch.triu(torch.ones(rank, rank), 1))

    def orthogonal(self) -> Tensor:
        """Returns Q of every layer, [layers, D, M]."""
        layers, reflections, dimension = self.v.shape
        q = torch.eye(dimension, self.c.shape[1], dtype=self.v.dtype, device=self.v.device).expand(layers, -1, -1)
        unit = self.v / self.v.norm(dim=2, keepdim=True)
        for k in range(reflections):
            v = unit[:, k, :, None]
            q = q - 2 * v @ (v.mT @ q)
        return q

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Maps z [S, D] to its images [S, D] and the logs of |det df/dz| [S]."""
        d1, d2 = torch.tanh(self.d1), torch.tanh(self.d2)
        r1, r2 = (self._upper * r + torch.diag_embed(d) for r, d in ((self.r1, d1), (self.r2, d2)))
        q = self.orthogonal()
        inward, outward = q @ r2.mT, r1.mT @ q.mT
        activations = []
        for into, out, c in zip(inward, outward, self.c, strict=True):
            activations.append(torch.tanh(torch.addmm(c, z, into)))
            z = torch.addmm(z, activations[-1], out)
        slopes = 1 - torch.stack(activations, dim=1).square()
        return z, torch.log1p(slopes * (d1 * d2)).sum(dim=(1, 2))


class Flow(nn.Module):
    """Represents a distribution over vectors of a fixed dimension: a base N(0, sigma^2 I) and layers."""

    def __init__(self, dimension: int, settings: FlowSettings) -> None:
        super().__init__()
        self.dimension, self.settings = dimension, settings
        self.layers: nn.Module = (
            Planar(dimension, settings.layers)
            if settings.kind == "planar"
            else Sylvester(dimension, settings.layers, settings.rank, settings.reflections)
        )

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Maps base samples [S, D] to their images [S, D] and the logs of the absolute determinants [S]."""
        images: tuple[Tensor, Tensor] = self.layers(z)
        return images

    def draw(self, count: int, generator: torch.Generator | None = None) -> Draws:
        """Draws samples with their densities. It is differentiable in the flow's parameters."""
        like = next(self.parameters())
        sigma = self.settings.sigma
        z = sigma * torch.randn(count, self.dimension, dtype=like.dtype, device=like.device, generator=generator)
        values, log_determinant = self(z)
        constant = self.dimension * (math.log(sigma) + 0.5 * math.log(2 * math.pi))
        return Draws(values, -0.5 * (z / sigma).square().sum(dim=1) - constant - log_determinant)
