"""Implements the certified variant: the exponential mechanism on candidates that do not depend on the private rows.

On a finite set the exponential mechanism is sampled exactly, so its guarantee holds: epsilon-differential privacy with
delta 0 (`privmix.privacy.sampling.selection`). Candidates come from a prior.
"""

from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privmix.foundation.errors import InputError
from privmix.laboratory.heads.models import Parametrised, squared_loss
from privmix.laboratory.heads.row_function import RowFunction
from privmix.laboratory.heads.table import Table
from privmix.privacy.sampling.selection import SelectionEvent, loss_units, rate, select

UNSCALED = (
    "the features were scaled by the private rows, which no certified guarantee covers; give the bounds of every "
    "feature (--bounds FILE)"
)
_CANDIDATES_AT_ONCE = 128


@dataclass(frozen=True)
class CertifiedSettings:
    """Configures how candidates are drawn.

    Attributes:
        candidates: the number of candidates in each round, K.
        rounds: the number of rounds. Each selects one candidate and costs an equal part of epsilon.
        sigma: the standard deviation of the first round's prior N(0, sigma^2 I).
        shrink: the factor by which the spread of the candidates shrinks in each round.
    """

    candidates: int = 1024
    rounds: int = 4
    sigma: float = 0.5
    shrink: float = 0.5


@torch.no_grad()
def total_losses(model: Parametrised, thetas: Tensor, table: Table) -> NDArray[np.int64]:
    """Returns for each candidate the sum of the users' losses, each clipped to [0, 1], int64 [K].

    The unit is `selection.LOSS_UNITS`. A user's loss is the sum of the l2 losses of the user's rows. The computation is
    in float64, and a row's loss does not depend on the rows beside it, to the last bit (`RowFunction`).
    """
    order = np.argsort(table.users, kind="stable")
    owners = table.users[order]
    starts = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]])
    x, y = torch.from_numpy(table.x[order]).double(), torch.from_numpy(table.y[order]).double()
    totals, blocks = [], torch.split(thetas.double(), _CANDIDATES_AT_ONCE)
    tried = {len(block): RowFunction(partial(_losses, model, block), x, y) for block in (blocks[0], blocks[-1])}
    for block in blocks:
        losses = tried[len(block)].by(partial(_losses, model, block))(x, y).T.numpy()
        per_user = losses if len(starts) == len(owners) else np.add.reduceat(losses, starts, axis=1)
        totals.append(loss_units(per_user).sum(axis=1))
    return np.concatenate(totals)


def _losses(model: Parametrised, thetas: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Returns the loss of each row under each candidate, [R, K]."""
    return squared_loss(model.outputs(thetas, x), y).T


def event(table: Table, epsilon: float, settings: CertifiedSettings) -> SelectionEvent:
    """Returns the privacy event of a release.

    Raises:
        InputError: the features were scaled with statistics of the private rows, or epsilon is too small for the number
            of candidates.
    """
    if table.scaling != "public":
        raise InputError(f"table {table.name}: {UNSCALED}")
    try:
        selection = SelectionEvent(epsilon, table.unit, settings.rounds, uuid4().hex)
        rate(selection, settings.candidates)
    except ValueError as error:
        raise InputError(str(error)) from error
    return selection


def release(
    model: Parametrised,
    table: Table,
    event: SelectionEvent,
    settings: CertifiedSettings,
    *,
    seed: int = 0,
) -> Tensor:
    """Selects parameters [D] from candidates with the private rows, at the cost of the event.

    The first round's candidates come from the prior. Later rounds draw candidates around the previous selection, which
    is already charged: by adaptive composition the costs add up.

    Args:
        seed: the seed of the candidates, which need not be secret. The selection uses secret randomness.
    """
    generator = torch.Generator().manual_seed(seed)
    thetas = settings.sigma * torch.randn(settings.candidates, model.dimension, generator=generator)
    spread = thetas.std(dim=0)
    for done in range(event.rounds):
        chosen = thetas[select(total_losses(model, thetas, table), event)]
        spread = settings.shrink * spread
        if done < event.rounds - 1:
            steps = spread * torch.randn(settings.candidates, model.dimension, generator=generator)
            steps[0] = 0.0  # the previous selection stays a candidate
            thetas = chosen + steps
    return chosen
