"""Implements AdaPMixED, adaptive PMixED (Flemings, Razaviyayn, Annavaram 2024b, Algorithm 1).

Each query first passes a noisy screening, which mixes a little of the parts' mean into the public model and adds
Gaussian noise. If the result is too far from the public model, the public model answers. Otherwise the mean of all
parts' mollified distributions answers, and the token costs its measured loss: the largest divergence that leaving one
part out causes.

That loss depends on the private text. The ``ratio`` mollifier also has a data-independent bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import Field, model_validator

from privmix.foundation.lazily import torch
from privmix.privacy.accounting import leave_one_out, planning
from privmix.privacy.events import (
    SEPARATE_PARTS,
    Accountant,
    Divergences,
    Event,
    Guarantee,
    Orders,
    check_parts,
    real_orders,
)
from privmix.privacy.mollifiers import projection, renyi
from privmix.privacy.mollifiers.blocks import rows_at_once, scratch
from privmix.privacy.mollifiers.mixture import integer_weights, slack
from privmix.privacy.mollifiers.projection import Projection
from privmix.privacy.protocol import Answers, Protocol, Release
from privmix.privacy.protocols.pmixed import Mollifier, RatioEvent, radii
from privmix.privacy.sampling import noise
from privmix.privacy.settings import Enforced, Settings

if TYPE_CHECKING:
    from torch import Tensor

# The screening's noise is a multiple of this.
_GRID = 2.0**-44
# The minimum of noisy probabilities; smaller ones are raised to it.
_FLOOR = 2.0**-60
# The default radius if the losses are measured: the budget does not determine it then. With 100 parts, the default
# budget lasts for nearly a thousand tokens in the worst case.
_MEASURED_RADIUS = 1.0

_MEASURED = (
    *SEPARATE_PARTS,
    "epsilon and the end of the budget, which depend on the private text, are seen by the operator alone",
)
_MEASURED_GUARANTEE = Guarantee(
    status="data-dependent",
    source="Flemings et al. 2024b, Algorithm 1, measured on the private text",
    adjacency="part, as published",
    assumes=_MEASURED,
)


def screening_rdp(parts: int, sigma: float, mix: float, orders: Orders) -> Divergences:
    """Returns the Rényi loss of one screening: (lambda / (N sigma))^2 a.

    If one of N parts is replaced, the mixed means differ by lambda / N times the difference of two distributions, whose
    Euclidean norm is at most sqrt 2.
    """
    return np.asarray(real_orders(orders) * (mix / (parts * sigma)) ** 2)


@dataclass(frozen=True)
class ScreenedRatioEvent(Event):
    """Describes one token under the ratio mollifier; ``mix`` is lambda of the screening, ``sigma`` its noise.

    The divergences of screening and answer add up. Suppose that the decision were released too: given the decision, the
    token's distribution is p0 or the parts' mean, independent of the noise. So screening and answer are an adaptive
    composition, and the token is a projection of it. No dominating pair is available, because the exact pair of
    discrete Gaussian noise in many dimensions is unknown.
    """

    kind: ClassVar[str] = "adapmixed-ratio"
    measured: ClassVar[bool] = True
    parts: int
    radius: float
    sigma: float
    mix: float

    def __post_init__(self) -> None:
        RatioEvent(self.parts, 1.0, self.radius)
        _check_screening(self.sigma, self.mix)

    def rdp(self, orders: Orders) -> Divergences:
        screening = screening_rdp(self.parts, self.sigma, self.mix, orders)
        return screening + RatioEvent(self.parts, 1.0, self.radius).rdp(orders)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(
            status="certified", source="worst case of noisy screening and a mixture of bounded likelihood ratio"
        )


@dataclass(frozen=True)
class ScreenedRenyiEvent(Event):
    """Describes one token under the published mollifier with a ball of radius ``beta * order``: no bound is known."""

    kind: ClassVar[str] = "adapmixed-renyi"
    measured: ClassVar[bool] = True
    parts: int
    order: float
    beta: float
    sigma: float
    mix: float

    def __post_init__(self) -> None:
        check_parts(self.parts)
        _check_order(self.order)
        if not 0.0 < self.beta < np.inf:
            raise ValueError(f"beta must be a finite number above 0, got {self.beta}")
        _check_screening(self.sigma, self.mix)

    def rdp(self, orders: Orders) -> Divergences:
        return np.full(len(real_orders(orders)), np.inf)

    @property
    def guarantee(self) -> Guarantee:
        return _MEASURED_GUARANTEE


@dataclass(frozen=True)
class AdaPMixed(Protocol):
    """Implements AdaPMixED.

    Attributes:
        parts: N, the number of parts. All parts answer every query.
        mollifier: ``ratio`` or ``renyi``.
        projection: the projection of the ratio mollifier (`privmix.privacy.mollifiers.projection`).
        radius: c of the ratio mollifier, in nats.
        beta: the renyi mollifier keeps D_a<-> to the public model within beta a.
        order: the Rényi order a of the measured losses and of the renyi mollifier. As published, a loss is the
            divergence that leaving one part out causes.
        screening_order: the Rényi order of the screening's divergence.
        sigma: the standard deviation of the screening's noise.
        mix: lambda, the parts' share in the screened mixture.
        threshold: the divergence above which the public model answers.
        top_k: the number of the public model's most likely tokens that the screening compares.
        enforce: what the budget limits.

    Raises:
        ValueError: a field is out of range, or does not belong to the mollifier.
    """

    name: ClassVar[str] = "adapmixed"
    noisy: ClassVar[bool] = True
    parts: int
    mollifier: Mollifier = "ratio"
    projection: Projection = "clip"
    radius: float | None = None
    beta: float | None = None
    order: float = 18.0
    screening_order: float = 18.0
    sigma: float = 1e-2
    mix: float = 1e-4
    threshold: float = 4.5
    top_k: int = 60
    enforce: Enforced = "bound"

    def __post_init__(self) -> None:
        for field, choices in (("mollifier", Mollifier), ("projection", Projection), ("enforce", Enforced)):
            if getattr(self, field) not in get_args(choices):
                raise ValueError(f"{field} must be one of {', '.join(get_args(choices))}, got {getattr(self, field)!r}")
        check_parts(self.parts)
        _check_order(self.order)
        _check_order(self.screening_order)
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be a number of at least 0, got {self.threshold}")
        if not isinstance(self.top_k, int) or self.top_k < 2:
            raise ValueError(f"top_k must be an integer of at least 2, got {self.top_k}")
        match self.event:
            case ScreenedRatioEvent(parts, radius):
                low, high = radii(parts)
                if not low <= radius <= high:
                    raise ValueError(f"radius must be from {low} to {high} with these parts, got {radius}")
            case ScreenedRenyiEvent(order=order, beta=beta):
                if self.enforce == "bound":
                    raise ValueError("enforce must be 'measured' with the renyi mollifier: it has no bound")
                _check_resolved(order, beta)

    def distribution(self, answers: Answers) -> Release:
        screening = screening_rdp(self.parts, self.sigma, self.mix, [self.order])
        losses = np.repeat(screening[:, None], len(answers.public), axis=0)
        without_parts = Answers(answers.public, answers.ratios[:0], ((),) * len(answers.public))
        weights = integer_weights(without_parts, _unchanged)
        answered = self._passes_screening(answers)
        for s, (first, last) in enumerate(answers.spans()):
            if answered[s] and last > first:
                rows = self._mollified(answers.ratios[first:last], answers.public[s])
                own = Answers(answers.public[s : s + 1], rows, answers.models[s : s + 1])
                losses[s] += leave_one_out.losses(rows, answers.public[s], self.order).max()
                weights[s] = integer_weights(own, _unchanged)[0]
        return Release(weights, losses)

    @cached_property
    def event(self) -> ScreenedRatioEvent | ScreenedRenyiEvent:
        if self.mollifier == "ratio":
            if self.radius is None or self.beta is not None:
                raise ValueError("the ratio mollifier takes radius, and no beta")
            return ScreenedRatioEvent(self.parts, self.radius, self.sigma, self.mix)
        if self.radius is not None or self.beta is None:
            raise ValueError("the renyi mollifier takes beta, and no radius")
        return ScreenedRenyiEvent(self.parts, self.order, self.beta, self.sigma, self.mix)

    @property
    def guarantee(self) -> Guarantee:
        return self.event.guarantee if self.enforce == "bound" else _MEASURED_GUARANTEE

    def _passes_screening(self, answers: Answers) -> NDArray[np.bool_]:
        """Returns which of the S sequences the parts answer, bool [S]."""
        public, tokens = answers.public.topk(min(self.top_k, answers.public.shape[1]), dim=1)
        counts = torch.tensor([len(models) for models in answers.models], device=public.device)
        sequence = torch.repeat_interleave(torch.arange(len(counts), device=public.device), counts)
        seen = answers.ratios.gather(1, tokens[sequence]).double() * public[sequence]
        # The sensitivity requires sums of at most 1, whatever was rounded before.
        seen /= seen.sum(dim=1, keepdim=True).clamp_min_(1)
        p0 = public.double()
        mean = torch.zeros_like(p0).index_add_(0, sequence, seen) / counts.clamp_min(1)[:, None]
        known, mean = p0.cpu().numpy(), torch.where(counts[:, None] > 0, mean, p0)
        noisy = self._noisy(mean.cpu().numpy()) + (1 - self.mix) * known
        return screening_divergence(noisy, known, self.screening_order) <= self.threshold

    def _noisy(self, mean: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns lambda times the parts' mean [S, k] with noise.

        Rounding to the grid increases the distance of two neighbouring means beyond sqrt(2) lambda / N: by at most 1
        for each of k entries, and by twice the float64 error of a sum of N terms. The noise is larger than sigma by
        the same factor, so the stated cost holds.
        """
        apart = math.sqrt(2) * self.mix / (self.parts * _GRID)
        rounding = math.sqrt(mean.shape[1]) * (1 + self.mix / _GRID * (self.parts + 8) * 2.0**-52)
        scale = self.sigma / _GRID * (1 + rounding / apart)
        whole = np.rint(mean * (self.mix / _GRID)).astype(np.int64)
        return np.asarray(noise.discrete_gaussian(whole, scale) * _GRID)

    def _mollified(self, ratios: Tensor, public: Tensor) -> Tensor:
        """Returns the mollified rows, float32 [n, V], in scratch memory."""
        rows = scratch("mollified", ratios)
        at_once = rows_at_once(ratios)
        for start in range(0, len(ratios), at_once):
            self._mollify(ratios[start : start + at_once], public, rows[start : start + at_once])
        return rows

    def _mollify(self, ratios: Tensor, public: Tensor, out: Tensor) -> Tensor:
        match self.event:
            case ScreenedRatioEvent(parts, radius):
                project = projection.clip if self.projection == "clip" else projection.mix
                return project(ratios, public, radius - slack(parts, radius), out)
            case ScreenedRenyiEvent(order=order, beta=beta):
                return renyi.mollify(ratios, public, order, beta * order, out)


class AdaPMixedSettings(Settings):
    """All parts, averaged after a noisy screening; the cost of a token is measured on the private text."""

    mechanism: ClassVar[type[Protocol]] = AdaPMixed
    choose: ClassVar[str] = "parts that mostly agree, and an unknown number of tokens"
    derived: ClassVar[str | None] = "radius"

    protocol: Literal["adapmixed"] = "adapmixed"
    mollifier: Mollifier = Field(
        AdaPMixed.mollifier, description="ratio also has a certified bound; renyi is as published"
    )
    projection: Projection = Field(
        AdaPMixed.projection, description="ratio: the closest member of the ball in KL, or a mixture with p0"
    )
    radius: float | None = Field(
        None, gt=0, description="ratio: c, of the ball around p0, in nats; 1 where losses are enforced as measured"
    )
    order: float = Field(
        AdaPMixed.order,
        gt=1,
        description="the Rényi order of the screening; and of the losses, where the budget limits these",
    )
    beta: float = Field(0.2, gt=0, description="renyi: its ball keeps within beta times the order of p0")
    sigma: float = Field(AdaPMixed.sigma, gt=0, le=1, description="standard deviation of the screening's noise")
    mix: float = Field(AdaPMixed.mix, gt=0, le=1, description="lambda, the parts' share in the screened mixture")
    threshold: float = Field(
        AdaPMixed.threshold, ge=0, description="the divergence above which the public model answers"
    )
    top_k: int = Field(
        AdaPMixed.top_k, ge=2, description="the number of most likely public tokens that the screening compares"
    )
    enforce: Enforced | None = Field(
        None, description="the budget limits the bound (default with ratio) or the measured losses (with renyi)"
    )

    @model_validator(mode="after")
    def _mollifier_has_them(self) -> Self:
        if self.mollifier == "renyi" and self.radius is not None:
            raise ValueError("radius: the renyi mollifier has beta instead")
        if self.mollifier == "renyi" and self.enforce == "bound":
            raise ValueError("enforce must be 'measured' with the renyi mollifier: it has no bound")
        return self

    @property
    def enforced(self) -> Enforced:
        return self.enforce or ("bound" if self.mollifier == "ratio" else "measured")

    def plan(self, parts: int, kept: Accountant | None = None) -> AdaPMixed:
        radius = self._radius(parts, kept) if self.mollifier == "ratio" else None
        return AdaPMixed(
            parts=parts,
            mollifier=self.mollifier,
            projection=self.projection,
            radius=radius,
            beta=None if radius else self.beta,
            order=self._order_of_losses(parts, radius, kept),
            screening_order=self.order,
            sigma=self.sigma,
            mix=self.mix,
            threshold=self.threshold,
            top_k=self.top_k,
            enforce=self.enforced,
        )

    def _radius(self, parts: int, kept: Accountant | None) -> float:
        if self.radius is not None:
            return self.radius
        if self.enforced == "measured":
            return _MEASURED_RADIUS
        return self.largest(lambda radius: self._ratio(parts, radius), radii(parts), kept)

    def _order_of_losses(self, parts: int, radius: float | None, kept: Accountant | None) -> float:
        """Returns the order of the ledger: the best order of the bound if the bound is enforced, else `order`."""
        if radius is not None and self.enforced == "bound":
            cost = planning.cost(self._ratio(parts, radius), self.tokens, self.delta, before=self.spent_before)
            return cost.best_order if kept is None else kept.order
        if kept is not None and kept.order != self.order:
            raise ValueError(f"order must be the ledger's, {kept.order:g}, got {self.order:g}")
        return self.order

    def _ratio(self, parts: int, radius: float) -> ScreenedRatioEvent:
        return ScreenedRatioEvent(parts, radius, self.sigma, self.mix)


def screening_divergence(noisy: NDArray[np.float64], public: NDArray[np.float64], order: float) -> NDArray[np.float64]:
    """Returns D_a between each noisy row [S, k] and p0, on tokens with p0 > 0, after normalising both, float64 [S]."""
    known = public > 0
    q, p = np.where(known, np.maximum(noisy, _FLOOR), 0.0), np.where(known, public, 0.0)
    p = p / p.sum(axis=1, keepdims=True)
    ratios = np.divide(q / q.sum(axis=1, keepdims=True), p, out=np.ones_like(p), where=known)
    return np.asarray(scipy.special.logsumexp(order * np.log(ratios), axis=1, b=p) / (order - 1))


def _unchanged(rows: Tensor, public: Tensor, drawn: int, out: Tensor) -> Tensor:
    return rows


def _check_order(order: float) -> None:
    if not 1 < order < np.inf:
        raise ValueError(f"order must be a finite number above 1, got {order}")


def _check_screening(sigma: float, mix: float) -> None:
    for field, value in (("sigma", sigma), ("mix", mix)):
        if not 0.0 < value <= 1.0:
            raise ValueError(f"{field} must lie above 0 and at most 1, got {value}")


def _check_resolved(order: float, beta: float) -> None:
    try:
        renyi.mollify(torch.ones(1, 2), torch.full((2,), 0.5), order, beta * order)
    except ValueError as error:
        raise ValueError(f"beta must be larger, got {beta:g}: {error}") from error
