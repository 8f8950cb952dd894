"""Implements DP-SGD (Abadi et al. 2016): the training of one model is private, so its tokens cost nothing more.

Every step takes all records, or all users, or draws a batch that contains each with the same probability. It clips the
gradient of each unit to an L2 norm, and adds Gaussian noise to the sum. Sampling from the trained model is
post-processing: any number of tokens is charged once, for the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import scipy
from pydantic import Field

from privmix.foundation.units import Unit, check_unit
from privmix.privacy import accounting
from privmix.privacy.events import PLD_INTERVAL, Accountant, Divergences, Event, Guarantee, Orders, real_orders
from privmix.privacy.protocol import Answers, Protocol, Release
from privmix.privacy.protocols.ensemble import Ensemble
from privmix.privacy.settings import Settings, Training

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

# How closely a search finds the smallest noise with which dp-accounting agrees, as a factor.
_STEP = 1.002
_FULL_BATCH_STEP = 1.00005
# An epsilon that counts as none.
_NO_COST = 1e-12
# The largest noise multiplier: with more noise a model learns nothing.
_MAX_NOISE = 1e6
# The largest order at which the divergence of subsampled steps is computed. Larger ones take minutes.
_MAX_SUBSAMPLED_ORDER = 257
# The largest sensitivity, in standard deviations of the noise of all steps together, that a search considers.
_MAX_MU = 100.0


@dataclass(frozen=True)
class DpSgdEvent(Event):
    """Describes the training from which all tokens come.

    Attributes:
        unit: the protected unit: one document (``record``), or all documents of one ``user``.
        noise_multiplier: the standard deviation of the noise in each coordinate, divided by the clipping norm.
        sampling_rate: the probability with which each record, or user, is in a step's batch; 1 for all of them.
        steps: the number of steps.
        run: the id of the training. The costs of trainings with different ids add up, even if their numbers are equal.
    """

    kind: ClassVar[str] = "dp-sgd"
    once: ClassVar[bool] = True
    unit: Unit
    noise_multiplier: float
    sampling_rate: float
    steps: int
    run: str | None = None

    def __post_init__(self) -> None:
        check_unit(self.unit)
        if not 0.0 < self.noise_multiplier < np.inf:
            raise ValueError(f"noise_multiplier must be a finite number above 0, got {self.noise_multiplier}")
        if not 0.0 < self.sampling_rate <= 1.0:
            raise ValueError(f"sampling_rate must be a probability above 0, got {self.sampling_rate}")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps must be an integer of at least 1, got {self.steps}")

    def rdp(self, orders: Orders) -> Divergences:
        """Returns the Rényi divergence of the whole training, with one record or user present or absent.

        With full batches it is exact: that of Gaussian mechanisms (Mironov 2017, Proposition 7). Otherwise it is exact
        at integer orders (Mironov, Talwar, Zhang 2019, section 3.3). Since (a - 1) D_a is convex in a and 0 at a = 1,
        the chord bounds it between integer orders.
        """
        a = real_orders(orders)
        if self.sampling_rate == 1.0:
            return np.asarray(self.steps * a / (2 * self.noise_multiplier**2))
        known = a <= _MAX_SUBSAMPLED_ORDER  # there is no other bound
        whole = np.arange(1, max(2, int(np.ceil(a[known].max(initial=2.0)))) + 1)
        moments = (whole - 1) * _rdp(self.noise_multiplier, self.sampling_rate, len(whole))
        return np.where(known, self.steps * np.interp(a, whole, moments) / (a - 1), np.inf)

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        """Returns the distribution of the whole training: composed subsampled Gaussians (Zhu, Dong, Wang 2022).

        Steps on full batches together are one Gaussian mechanism with 1 / sqrt(steps) of the noise (Dong, Roth, Su
        2022, Corollary 3.3), so their privacy losses are rounded only once.
        """
        return _pld(self.noise_multiplier, self.sampling_rate, self.steps, interval)

    def epsilon(self, delta: float) -> float:
        """Returns the epsilon of the whole training at ``delta``."""
        return float(accounting.pld_epsilon({self: 1}, delta) or 0.0)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(
            status="certified",
            source=f"Abadi et al. 2016; {self._mechanism}, in Rényi divergences or as a privacy loss distribution",
            assumes=(
                "every option of the training was chosen without looking at the private text",
                "the batches, the gradients and the noise of the training stay secret",
                "noise in floating point is as good as noise on the real numbers",
            ),
            adjacency=self.unit,
            seen="any number of released tokens",
        )

    @property
    def _mechanism(self) -> str:
        return f"the {'' if self.sampling_rate == 1.0 else 'Poisson-subsampled '}Gaussian mechanism"


@dataclass(frozen=True)
class DpSgd(Protocol):
    """Samples from the model that DP-SGD trained.

    Raises:
        ValueError: the ensemble has more than one part.
    """

    name: ClassVar[str] = "dp-sgd"
    order = None
    parts: int
    training: DpSgdEvent

    def __post_init__(self) -> None:
        if self.parts != 1:
            raise ValueError(
                f"parts must be 1 for protocol dp-sgd, and this ensemble has {self.parts}: "
                "train one model with `privmix train-base`"
            )

    @property
    def rows(self) -> int:
        return 1

    def draw(self) -> tuple[int, ...]:
        return (0,)

    def distribution(self, answers: Answers) -> Release:
        return Ensemble(1).distribution(answers)

    @cached_property
    def event(self) -> DpSgdEvent:
        return self.training


class DpSgdSettings(Settings):
    """One model trained with DP-SGD, charged once for its training and never for tokens."""

    mechanism: ClassVar[type[Protocol]] = DpSgd
    one_model: ClassVar[bool] = True
    choose: ClassVar[str] = "more tokens than a budget for tokens would last for, or a reference"

    protocol: Literal["dp-sgd"] = "dp-sgd"
    # These fields describe the training. When the ensemble is served, they come from its manifest.
    noise_multiplier: float = Field(1.0, gt=0, description="of the clipping length; served: as trained")
    sampling_rate: float = Field(0.01, gt=0, le=1, description="of a step's batch; served: as trained")
    steps: int = Field(1000, gt=0, description="of the training; served: as trained")
    run: str | None = Field(None, description="the training's name in the ledger; served: as trained")

    def plan(self, parts: int, kept: Accountant | None = None) -> DpSgd:
        training = DpSgdEvent("user", self.noise_multiplier, self.sampling_rate, self.steps, self.run)
        return DpSgd(parts, training)

    def for_training(self, training: Training | None) -> Self:
        """Completes these settings with the ensemble's training and its guarantee.

        Raises:
            ValueError: the ensemble was not trained with DP-SGD, these settings contradict its training, or their
                epsilon is less than the training's cost.
        """
        if training is None:
            raise ValueError(
                "protocol: dp-sgd serves what `privmix train-base` trained, and this ensemble was trained without "
                "privacy: its tokens would cost without limit; take another protocol, or train again"
            )
        known = {name: value for name, value in asdict(training.event).items() if name in type(self).model_fields}
        for name in known.keys() & self.model_fields_set:
            if getattr(self, name) != known[name]:
                raise ValueError(f"{name}: the ensemble was trained with {known[name]}; leave it out")
        promise = {"epsilon": training.epsilon, "delta": training.delta}
        chosen = {name: value for name, value in promise.items() if name not in self.model_fields_set}
        completed = self.model_copy(update=known | chosen)
        cost = completed.plan(1).training.epsilon(completed.delta)
        if completed.epsilon is not None and cost > completed.epsilon:
            raise ValueError(
                f"epsilon: the training cost {accounting.shown(cost, 4)} at delta {completed.delta:g}, which is more "
                f"than {accounting.stated(completed.epsilon)}; leave epsilon out, or train again with more noise"
            )
        return completed


@lru_cache(maxsize=64)
def noise_multiplier(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """Returns the noise multiplier with which a training stays within (epsilon, delta).

    The search begins at the exact delta of the Gaussian mechanism (Balle & Wang 2018, Theorem 8), or near it for
    subsampled batches, and asks dp-accounting, which ledgers use.

    Raises:
        ValueError: no noise suffices.
    """

    @cache
    def excess(log_noise: float) -> float:
        """Returns the log of the cost over epsilon."""
        cost = DpSgdEvent("record", math.exp(log_noise), sampling_rate, steps).epsilon(delta)
        return math.log(max(cost, _NO_COST) / epsilon)

    least = DpSgdEvent("record", _MAX_NOISE, sampling_rate, steps)
    if accounting.epsilon(least.rdp(accounting.ORDERS), delta).epsilon > epsilon and excess(math.log(_MAX_NOISE)) > 0:
        raise ValueError(
            f"epsilon {accounting.stated(epsilon)} at delta {delta:g} is too small for {steps} steps at rate "
            f"{sampling_rate:g}"
        )
    gaussian = full_batch_noise(epsilon, delta, steps)
    if sampling_rate == 1.0:
        return _root(excess, gaussian, _FULL_BATCH_STEP)
    # The central limit of many small steps (Bu, Dong, Long, Su 2020): mu is rate sqrt(steps (e^(1 / noise^2) - 1)).
    return _root(excess, 1 / math.sqrt(math.log1p(1 / (gaussian * sampling_rate) ** 2)), _STEP)


def _root(excess: Callable[[float], float], guess: float, step: float) -> float:
    """Returns the smallest noise without excess, up to a factor of ``step``. The excess falls with the log of noise."""
    start, width = math.log(guess), math.log(step)
    if -width < excess(start) <= 0:
        return guess
    end, stride = start, math.copysign(max(abs(excess(start)), width), excess(start))
    while excess(end) * excess(start) > 0:
        end, stride = end + stride, 2 * stride
    found = float(scipy.optimize.brentq(excess, *sorted((start, end)), xtol=width / 4))
    while excess(found) > 0:
        found += width / 2
    return math.exp(found)


def full_batch_noise(epsilon: float, delta: float, steps: int) -> float:
    """Returns the noise multiplier at which steps on full batches have exactly this delta at epsilon.

    It takes a millisecond, and `noise_multiplier` is at most some 1e-4 larger.

    Raises:
        ValueError: no noise has.
    """

    normal = scipy.stats.norm

    def excess(mu: float) -> float:
        return (
            float(normal.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + normal.logcdf(-mu / 2 - epsilon / mu))) - delta
        )

    mu = scipy.optimize.brentq(excess, math.sqrt(steps) / _MAX_NOISE, _MAX_MU, xtol=1e-12)
    return math.sqrt(steps) / float(mu)


@lru_cache(maxsize=64)
def _rdp(noise: float, rate: float, largest: int) -> Divergences:
    """Returns the divergence of one step at the orders 1, 2, ... ``largest``; 0 at order 1, where its factor is 0."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent  # slow to import
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(np.arange(2, largest + 1))
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)))
    return np.concatenate([[0.0], accountant.rdp])


@lru_cache(maxsize=16)
def _pld(noise: float, rate: float, steps: int, interval: float) -> PrivacyLossDistribution:
    from dp_accounting.pld import privacy_loss_distribution  # slow to import

    if rate == 1.0:
        return privacy_loss_distribution.from_gaussian_mechanism(
            noise / math.sqrt(steps), value_discretization_interval=interval
        )
    step = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval
    )
    return step.self_compose(steps)
