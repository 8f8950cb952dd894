"""Implements the exponential mechanism over a finite set of candidates (McSherry & Talwar 2007) with integer weights.

The candidates do not depend on the private rows; they may be models drawn from a prior. Each user has a loss in [0, 1]
under each candidate. Candidate k is selected with probability proportional to exp(-rate L_k), where L_k is the sum of
the users' losses, and rate = epsilon / 2. When one user's rows are replaced, the log-probability of candidate k changes
by -rate (l'_k - l_k) plus a constant. Since l'_k - l_k lies in [-1, 1], that is in an interval of length epsilon.

So the mechanism has bounded range epsilon (Durfee & Rogers 2019), which implies epsilon-differential privacy, delta 0.
The selected candidate is a whole model, which answers any number of queries at no further cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from privmix.foundation.lazily import torch
from privmix.foundation.units import Unit, check_unit
from privmix.privacy.accounting.bounded_range import bounded_range_rdp, hockey_stick
from privmix.privacy.accounting.dominating_pair import symmetric_pld
from privmix.privacy.arrays import Integers
from privmix.privacy.events import PLD_INTERVAL, Divergences, Event, Guarantee, Orders
from privmix.privacy.sampling.categorical import TOTAL, sample

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

LOSS_UNITS = 2**20
"""Losses are integer multiples of 1 / LOSS_UNITS: sums are exact, and one user changes a sum by at most LOSS_UNITS."""

# Log-weights are at least the largest minus this cap. A candidate that far behind is almost never selected, and the
# smallest weight bounds the effect of rounding to integers. With d_k = L_k - min L, the cap preserves the range:
# between neighbouring tables the change of d_k, capped or not, lies in one interval of the same length that contains 0.
_CAP = 20.0
# The relative float64 error of rate d_k and its exponential.
_FLOAT_ERROR = 2.0**-45
# The largest fraction of epsilon that may be lost to rounding.
_MAX_LOSS = 0.5


@dataclass(frozen=True)
class SelectionEvent(Event):
    """Describes selections in rounds. The candidates of a round may depend on the selections of earlier rounds.

    Attributes:
        epsilon: the epsilon of all rounds together. In each round, the change of every log-probability lies in an
            interval of length epsilon / rounds.
        unit: what is replaced between neighbouring tables: one row (``record``) or all rows of one ``user``.
        rounds: the number of selections.
        run: the id of the release. Equal releases with different ids add up.
    """

    kind: ClassVar[str] = "exponential-selection"
    once: ClassVar[bool] = True
    epsilon: float
    unit: Unit = "user"
    rounds: int = 1
    run: str | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.epsilon < np.inf:
            raise ValueError(f"epsilon must be a finite number above 0, got {self.epsilon}")
        if not isinstance(self.rounds, int) or self.rounds < 1:
            raise ValueError(f"rounds must be an integer of at least 1, got {self.rounds}")
        check_unit(self.unit)

    @property
    def range(self) -> float:
        """The length of the interval in each round."""
        return self.epsilon / self.rounds

    def rdp(self, orders: Orders) -> Divergences:
        """Returns the exact worst case of bounded range."""
        return self.rounds * bounded_range_rdp(orders, self.range)

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        single = symmetric_pld(lambda epsilon: hockey_stick(epsilon, self.range), self.range, interval)
        return single.self_compose(self.rounds)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(
            status="certified",
            source="McSherry & Talwar 2007; bounded range: Durfee & Rogers 2019",
            adjacency=self.unit,
            assumes=(
                "the candidates, the scaling of the features and every setting were chosen without the private rows",
                f"the loss of one {self.unit} does not depend, in floating point, on the other rows beside it",
            ),
            seen="any number of predictions, or the model itself",
        )


def loss_units(losses: ArrayLike) -> Integers:
    """Clips losses to [0, 1] and returns them in units of 1 / LOSS_UNITS, int64 of the same shape. NaN counts as 1."""
    clipped = np.clip(np.nan_to_num(np.asarray(losses, dtype=np.float64), nan=1.0, posinf=1.0, neginf=0.0), 0.0, 1.0)
    return np.asarray(np.floor(clipped * LOSS_UNITS), dtype=np.int64)


def rate(event: SelectionEvent, candidates: int) -> float:
    """Returns the factor of the losses in the exponent, reduced by the fraction of epsilon that rounding may use.

    A weight is floor(M e^x) for x in [-20, 0] and M = 2**61 / candidates (a power of two). The error of its logarithm
    is at most 2 e^20 / M plus the error of float64, with either sign, in either table.

    Raises:
        ValueError: rounding takes more than half of epsilon.
    """
    error = 2 * np.exp(_CAP) / _largest(candidates) + _FLOAT_ERROR
    if 2 * error > _MAX_LOSS * event.range:
        raise ValueError(
            f"candidates: {candidates} are too many for integer weights at epsilon {event.range:g} in each round"
        )
    return float(event.range - 2 * error) / 2


def integer_weights(losses: ArrayLike, event: SelectionEvent) -> Tensor:
    """Returns weights proportional to exp(-rate L_k), int64 [1, K], from the total losses int64 [K] in `LOSS_UNITS`.

    Raises:
        ValueError: the losses are not integers, or too many for integer weights.
    """
    totals = np.asarray(losses)
    if totals.ndim != 1 or totals.dtype != np.int64:
        raise ValueError(f"losses must be int64 [candidates] (see loss_units), got {totals.dtype} {list(totals.shape)}")
    exponents = rate(event, len(totals)) * ((totals - totals.min()) / LOSS_UNITS)
    weights = np.floor(_largest(len(totals)) * np.exp(-np.minimum(exponents, _CAP))).astype(np.int64)
    return torch.from_numpy(weights)[None]


def select(losses: ArrayLike, event: SelectionEvent) -> int:
    """Selects a candidate by the total losses, int64 [K] in `LOSS_UNITS`; returns its index."""
    (chosen,) = sample(integer_weights(losses, event))
    return chosen


def _largest(candidates: int) -> float:
    """Returns the weight of the best candidate: a power of two for which the total stays below 2**62."""
    return float(TOTAL / 2 / 2 ** int(np.ceil(np.log2(max(candidates, 1)))))
