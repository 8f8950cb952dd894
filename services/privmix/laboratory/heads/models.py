"""Defines the heads' models. Outputs lie in [0, 1]; many parameter vectors can be evaluated in one batch."""

from collections.abc import Callable, Mapping
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu
from torch import Tensor, nn
from torch.func import functional_call, vmap

from privmix.privacy.arrays import Reals

# The number of parameter vectors in a batch.
_AT_ONCE = 100


class LogisticRegression(nn.Module):
    """Computes sigmoid(w^T x + b) of features [n, F]."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs, float [n]."""
        return torch.sigmoid(self.linear(x))[..., 0]


class Decay(nn.Module):
    """Computes exp(-max(0, w d + b)) elementwise, the decay of an old value (Che et al. 2018, equation 10)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.rand(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, since: Tensor) -> Tensor:
        return torch.exp(-torch.relu(since * self.weight + self.bias))


class GRUD(nn.Module):
    """Implements GRU-D (Che et al. 2018): missing inputs and the hidden state decay with the time since a measurement.

    The input is [n, T, 3 F]: values with the last one carried forward, masks (1 if measured), and days since the last
    measurement. Values are standardised, so an input decays to the mean 0.
    """

    def __init__(self, features: int, hidden: int = 16) -> None:
        super().__init__()
        self.features, self.hidden = features, hidden
        self.input_decay = Decay(features)
        self.hidden_decay = nn.Linear(features, hidden)
        self.gates = nn.Linear(2 * features + hidden, 2 * hidden)
        self.candidate = nn.Linear(2 * features + hidden, hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs, float [n]."""
        values, masks, since = torch.split(x, self.features, dim=-1)
        h = torch.zeros(len(x), self.hidden, dtype=x.dtype, device=x.device)
        for hour in range(x.shape[1]):
            mask = masks[:, hour]
            value = mask * values[:, hour] + (1 - mask) * self.input_decay(since[:, hour]) * values[:, hour]
            h = torch.exp(-torch.relu(self.hidden_decay(since[:, hour]))) * h
            reset, update = torch.sigmoid(self.gates(torch.cat([value, mask, h], dim=1))).chunk(2, dim=1)
            new = torch.tanh(self.candidate(torch.cat([value, mask, reset * h], dim=1)))
            h = (1 - update) * h + update * new
        return torch.sigmoid(self.output(h))[:, 0]


class Parametrised:
    """Evaluates a module as a function of its parameters, given as one vector.

    Attributes:
        module: the structure. Only `vector` uses its own parameters.
        dimension: the number of parameters, D.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self._sizes = [prod(shape) for shape in self._shapes.values()]
        self.dimension = sum(self._sizes)

    def outputs(self, thetas: Tensor, x: Tensor) -> Tensor:
        """Returns the outputs in [0, 1] of each parameter vector in thetas [S, D] for inputs x [n, ...]: [S, n]."""
        if isinstance(self.module, LogisticRegression):  # one product instead of S
            return torch.sigmoid(thetas[:, :-1] @ x.T + thetas[:, -1:])
        call: Callable[[Mapping[str, Tensor]], Tensor] = lambda named: functional_call(  # noqa: E731
            self.module, dict(named), (x,)
        )
        return vmap(call)(self.named(thetas))

    def named(self, thetas: Tensor) -> dict[str, Tensor]:
        """Splits thetas [S, D] into parameters by name, each [S, *shape]."""
        pieces = torch.split(thetas, self._sizes, dim=-1)
        return {
            name: piece.reshape(*piece.shape[:-1], *shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    @property
    def vector(self) -> Tensor:
        """The module's own parameters, [D]."""
        return torch.cat([parameter.detach().flatten() for parameter in self.module.parameters()])


def squared_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns (output - target)^2, [S, n]."""
    return (outputs - targets).square()


@torch.no_grad()
def predictions(model: Parametrised, thetas: Tensor, x: NDArray[np.float32]) -> Reals:
    """Returns the outputs of each parameter vector in thetas [S, D] for rows x [n, ...], float64 [S, n]."""
    rows = torch.from_numpy(x)
    blocks = torch.split(thetas.float(), _AT_ONCE)
    return np.concatenate([model.outputs(block, rows).double().numpy() for block in blocks])


def auc(scores: Reals, y: NDArray[np.float32]) -> Reals:
    """Returns the area under the curve of each row of scores [S, n], float64 [S]. Ties count half (Mann & Whitney)."""
    inside, outside = scores[:, y == 1], scores[:, y == 0]
    wins = mannwhitneyu(inside, outside, axis=1, method="asymptotic").statistic
    return np.asarray(wins / (inside.shape[1] * outside.shape[1]))
