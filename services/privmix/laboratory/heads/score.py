"""Scores heads: computes areas under the ROC curve of many parameter vectors at once."""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from privmix.laboratory.heads.models import Parametrised
from privmix.laboratory.heads.table import Table
from privmix.privacy.arrays import Reals

_AT_ONCE = 100


def auc(scores: Reals, y: NDArray[np.float32]) -> Reals:
    """Returns the area under the curve of each row of scores [S, n], float64 [S]. Ties count half (Mann & Whitney)."""
    positive = y == 1
    count, others = int(positive.sum()), int((~positive).sum())
    ranks = rankdata(scores, axis=1)[:, positive].sum(axis=1)
    return np.asarray((ranks - count * (count + 1) / 2) / (count * others))


@torch.no_grad()
def outputs(model: Parametrised, thetas: Tensor, table: Table) -> Reals:
    """Returns the predictions of each parameter vector in thetas [S, D] for the table's rows, float64 [S, n]."""
    x = torch.from_numpy(table.x)
    return np.concatenate([model.outputs(block, x).double().numpy() for block in torch.split(thetas.float(), _AT_ONCE)])


def auc_of(model: Parametrised, thetas: Tensor, table: Table) -> Reals:
    """Returns the area under the curve of each parameter vector in thetas [S, D] on a table, float64 [S]."""
    blocks = torch.split(thetas, _AT_ONCE)
    return np.concatenate([auc(outputs(model, block, table), table.y) for block in blocks])
