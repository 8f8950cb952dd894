"""Defines the interface of a protocol: which models it queries, what it releases, and what a token costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from privmix.foundation.lazily import torch
from privmix.privacy.arrays import Reals
from privmix.privacy.events import Event, Guarantee

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Answers:
    """Holds the models' shaped distributions for one token of each of S sequences (`shaping.shape`).

    Attributes:
        public: float32 [S, V], the public model's probabilities: zero outside the kept set, at least 2**-36 inside.
        ratios: float32 [R, V], likelihood ratios u = p_i / p0 on the kept set (``sum_x p0 u = 1``), zero outside it.
        models: the indices of each sequence's drawn models, in the order of its rows. The rows of a sequence are
            contiguous and sequences come in order, so R is the sum of the lengths.
        allowances: int64 [S, parts], the most that each token may charge to the account of each part, for an event with
            accounts (`Event.accounts`).
    """

    public: Tensor
    ratios: Tensor
    models: tuple[tuple[int, ...], ...]
    allowances: Tensor | None = None

    def __post_init__(self) -> None:
        sequences, vocabulary = self.public.shape
        if len(self.models) != sequences:
            raise ValueError(f"models names {len(self.models)} sequences, public has {sequences} rows")
        drawn = sum(map(len, self.models))
        if self.ratios.shape != (drawn, vocabulary):
            raise ValueError(f"ratios must be [{drawn}, {vocabulary}], got {list(self.ratios.shape)}")
        if self.allowances is not None and (
            self.allowances.dtype != torch.int64 or self.allowances.ndim != 2 or len(self.allowances) != sequences
        ):
            raise ValueError(f"allowances must be int64 [{sequences}, parts], got {list(self.allowances.shape)}")
        if self.public.dtype != torch.float32 or self.ratios.dtype != torch.float32:
            raise ValueError(f"public and ratios must be float32, got {self.public.dtype} and {self.ratios.dtype}")

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields the first and the past-the-end row of `ratios` for each sequence."""
        return pairwise(accumulate(map(len, self.models), initial=0))

    def first(self, count: int) -> Answers:
        """Returns the answers for the first ``count`` sequences."""
        return self.between(0, count)

    def between(self, start: int, end: int) -> Answers:
        """Returns the answers for the sequences from ``start`` to before ``end``."""
        own = slice(start, end)
        first = sum(map(len, self.models[:start]))
        rows = slice(first, first + sum(map(len, self.models[own])))
        allowances = None if self.allowances is None else self.allowances[own]
        return Answers(self.public[own], self.ratios[rows], self.models[own], allowances)


@dataclass(frozen=True)
class PartRows:
    """Holds shaped rows of the same number of parts for each of S sequences. Operations on them have a fixed shape.

    Attributes:
        public: float32 [S, V], p0, as in `Answers`.
        ratios: float32 [S, n, V], likelihood ratios, as in `Answers`.
        drawn: bool [S, n], false for rows that only fill the shape, of no part. Their ratios are finite.
        allowances: int64 [S, n], the most that each token may charge to the account of each part; see `Answers`.
    """

    public: Tensor
    ratios: Tensor
    drawn: Tensor
    allowances: Tensor | None = None


@dataclass(frozen=True)
class PartLogits:
    """Holds the rows of the same number of parts for each of S sequences, before they are shaped.

    Attributes:
        public: float32 [S, V], p0, as in `Answers`.
        log_p: [S, n, V], natural log-probabilities; a row may lack a constant, as logits do.
        scales: float32 [S], bits per nat over the temperature.
        drawn, allowances: see `PartRows`.
    """

    public: Tensor
    log_p: Tensor
    scales: Tensor
    drawn: Tensor
    allowances: Tensor | None = None


@dataclass(frozen=True)
class Partial:
    """Holds what some of the parts add to the tokens of S sequences. Partials of disjoint sets of parts add up.

    Attributes:
        sums: [S, V], in the protocol's own type and unit.
        charges: int64 [S, n], what each token charges to each part; None unless the event has accounts.
    """

    sums: Tensor
    charges: Tensor | None = None


@dataclass(frozen=True)
class Release:
    """Holds the output distributions for one token of each of S sequences, and their data-dependent cost.

    Attributes:
        weights: int64 [S, V], with positive totals below 2**62. A token is sampled with probability weight / total.
            Weights are integers, so that the output distribution is known exactly (`categorical.sample`).
        losses: the Rényi loss of each token at the protocol's `order`: float64 [S, 1] if all parts have the same loss,
            [S, parts] otherwise; None unless the event is `measured`. They are private: only the ledger may see them.
        charges: int64 [S, parts], what each token charges to the account of each part, never more than
            `Answers.allowances`; None unless the event has `accounts`. They are private, too.
    """

    weights: Tensor
    losses: NDArray[np.float64] | None = None
    charges: Tensor | None = None


class Protocol(ABC):
    """Answers next-token queries from an ensemble of part models.

    A subclass is in one file of `protocols` together with its `Event` and its `Settings`, so that the mechanism, its
    cost and its parameters can be read together. It has `distribution` and `event`, and also `rows` and `draw` unless
    every model answers every query; evaluation uses `draws`, `law` and `chance_bounds`.

    Who computes what: the coordinator draws and samples. A protocol with `additive` says in `partial` what a shard
    computes from the rows of its own parts, beside them, and in `combine` what the first shard makes of the sum over
    shards; `distribution` is both. For other protocols the rows leave the shards, and the coordinator computes
    `distribution`.

    Attributes:
        name: the name in configuration and commands.
        noisy: whether `distribution` draws noise, so that it must be called again for every token.
        halves: whether each part has two models, each trained on half of its users. Models 2i and 2i + 1 then belong
            to part i; otherwise model i belongs to part i.
        parts: the number of parts in the ensemble.
        order: the only Rényi order at which the cost is known, that of `Release.losses`; None if all orders are known.
    """

    name: ClassVar[str]
    noisy: ClassVar[bool] = False
    halves: ClassVar[bool] = False
    parts: int
    order: float | None

    @property
    def rows(self) -> int | None:
        """The number of part rows that a token needs, an upper bound of the length of a draw. By default all models'.

        The configuration fixes it. None if the number of parts is drawn (mechanisms reproduced as published).
        """
        return self.models

    def draw(self) -> tuple[int, ...]:
        """Draws the models for one token of one sequence, at most `rows`, besides the public model. By default all."""
        return tuple(range(self.models))

    @abstractmethod
    def distribution(self, answers: Answers) -> Release:
        """Computes the output distributions from the models' answers. Draws the noise of a noisy protocol."""

    @property
    def additive(self) -> bool:
        """Whether the release is a function of p0 and of a sum over the parts (`partial`, `combine`)."""
        return False

    def partial(self, rows: PartRows) -> Partial:
        """Computes what some parts add to the release, on the device of the rows.

        Each row contributes by itself; rows that are not drawn add nothing. The number, the size and the order of the
        operations depend on the shape of the rows alone, and nothing waits for a value on the device.
        """
        raise NotImplementedError(f"{self.name} needs all rows together")

    def fused(self, rows: PartLogits) -> Partial | None:
        """Computes `partial` from rows before they are shaped, in kernels of its own; None where there are none.

        The result is that of `partial` up to rounding, and what it costs may not depend on that rounding.
        """
        return None

    def narrowed(self, sums: Tensor) -> Tensor:
        """Returns a partial's sums as they leave a shard: in the smallest type that holds every sum exactly."""
        return sums

    def added(self, partials: Sequence[Tensor]) -> Tensor:
        """Adds up the sums of disjoint groups of parts, as they left their shards; [S, V]. It may overwrite the first.

        Raises:
            ValueError: a sum is larger than what a draw can add.
        """
        sums, *others = partials
        for other in others:
            sums += other
        return sums

    def combine(self, public: Tensor, sums: Tensor, charges: Tensor | None = None) -> Release:
        """Computes the release from p0, float32 [S, V], and the sum of all parts' partials. Changes neither.

        Args:
            charges: int64 [S, parts], of all parts in their order.
        """
        raise NotImplementedError(f"{self.name} needs all rows together")

    def draws(self, kinds: Sequence[int]) -> Mapping[tuple[int, ...], float]:
        """Returns the probability of each draw from the protocol's description. Tests compare `draw` with it.

        Args:
            kinds: the number of models of each kind; the sum is `models`.

        Returns:
            a mapping from the numbers of drawn models of each kind to their probability. Draws with the same numbers
            are equally likely. By default every draw contains all models.
        """
        return {tuple(kinds): 1.0}

    def law(self, answers: Answers) -> Tensor | None:
        """Returns the distribution of one token given the history, float64 [S, V], from the answers of all models.

        It is the mean over the secret draw. Evaluation uses it; no token is sampled from it. None if it has no closed
        form: then estimate it with `draw` and `distribution`.
        """
        return None

    def chance_bounds(self, answers: Answers, tokens: Tensor) -> tuple[Reals, Reals] | None:
        """Returns upper bounds of the probabilities of int64 ``tokens`` [S], and their losses as a release has them.

        Protocols that release one noisy choice need it, because their weights contain only that choice. Evaluation
        then draws no noise. None means that the weights of `distribution` give the probabilities.
        """
        return None

    @property
    def models(self) -> int:
        """The number of models that the protocol needs from the ensemble."""
        return self.parts * (2 if self.halves else 1)

    @property
    @abstractmethod
    def event(self) -> Event:
        """The privacy event of one released token."""

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee for the released tokens."""
        return self.event.guarantee
