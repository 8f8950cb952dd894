"""What a protocol is: which models it asks, what it releases from their answers, and what that costs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.privacy.events import Event, Guarantee
from services.privacy.worlds import Reals


@dataclass(frozen=True)
class Answers:
    """The models' answers for one token of each of S sequences, shaped (`shaping.shape`).

    Attributes:
        public: float32 [S, V], the public model's probabilities: zero outside the kept set, at least 2**-36 inside.
        ratios: float32 [R, V], likelihood ratios u = p_i / p0 on the kept set (``sum_x p0 u = 1``), zero outside it.
        models: for each sequence the indices of the models asked, in the order of its rows. Rows of a sequence are
            contiguous and sequences come in order, so R is the sum of the lengths.
    """

    public: Tensor
    ratios: Tensor
    models: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        sequences, vocabulary = self.public.shape
        if len(self.models) != sequences:
            raise ValueError(f"models names {len(self.models)} sequences, public has {sequences} rows")
        asked = sum(map(len, self.models))
        if self.ratios.shape != (asked, vocabulary):
            raise ValueError(f"ratios must be [{asked}, {vocabulary}], got {list(self.ratios.shape)}")
        if self.public.dtype != torch.float32 or self.ratios.dtype != torch.float32:
            raise ValueError(f"public and ratios must be float32, got {self.public.dtype} and {self.ratios.dtype}")

    def spans(self) -> Iterator[tuple[int, int]]:
        """First and past-the-last row of `ratios` for each sequence."""
        return pairwise(accumulate(map(len, self.models), initial=0))

    def one(self, sequence: int) -> "Answers":
        """The answers for one of the sequences."""
        own = slice(sequence, sequence + 1)
        first, last = list(self.spans())[sequence]
        return Answers(self.public[own], self.ratios[first:last], self.models[own])

    def first(self, count: int) -> "Answers":
        """The answers for the first ``count`` sequences."""
        rows = sum(map(len, self.models[:count]))
        return Answers(self.public[:count], self.ratios[:rows], self.models[:count])


@dataclass(frozen=True)
class Release:
    """What is sampled from, for one token of each of S sequences, and what of its cost depends on the private text.

    Attributes:
        weights: int64 [S, V], positive totals below 2**62. A token is drawn with probability weight / total: integers,
            so that the distribution of what is released is known exactly (`categorical.sample`).
        losses: float64 [S, 1], the Rényi loss of each token at the protocol's `order` for every part alike, or
            [S, parts], for each part its own; None unless the event is `measured`. Private: for the ledger alone.
    """

    weights: Tensor
    losses: NDArray[np.float64] | None = None


class Protocol(ABC):
    """One way to answer next-token queries from an ensemble of part models.

    A subclass lives in one file of `protocols` together with its `Event` and its `Settings`, so that what is done, what
    it costs and what may be chosen are read together. Serving needs `rows`, `draw`, `release` and `event`; evaluation
    and audits also use the methods that have a default.

    Attributes:
        name: the name in configuration and commands.
        noisy: whether `release` draws noise, so that it is called anew for every token.
        effort: how much more work a release is than one without noise; audits release as many times fewer tokens.
        halves: whether each part answers with two models, trained on a half each. Model 2i and 2i + 1 are then those
            of part i; else model i is part i's.
        parts: how many parts the ensemble has.
        order: the one Rényi order at which the cost is known, that of `Release.losses`; None where all orders are.
    """

    name: ClassVar[str]
    noisy: ClassVar[bool] = False
    effort: ClassVar[int] = 1
    halves: ClassVar[bool] = False
    parts: int
    order: float | None

    @property
    @abstractmethod
    def rows(self) -> int | None:
        """How many part rows a token needs: fixed by the configuration, and an upper bound on the length of a draw.

        None where the number of parts is itself drawn (mechanisms reproduced as published).
        """

    @abstractmethod
    def draw(self) -> tuple[int, ...]:
        """Returns the models that one token of one sequence needs, at most `rows`, besides the public model."""

    @abstractmethod
    def release(self, answers: Answers) -> Release:
        """From the models' answers to what is sampled from. Draws its own noise where the protocol has any."""

    def draws(self, kinds: Sequence[int]) -> Mapping[tuple[int, ...], float]:
        """The chance of each draw, from the protocol's description; audits compare `draw` with it.

        Args:
            kinds: how many of the models there are of each kind; they add up to `models`.

        Returns:
            for each draw, as the number of models of each kind, its chance. By default every draw holds all models.
            Draws with the same numbers are equally likely.
        """
        return {tuple(kinds): 1.0}

    def law(self, answers: Answers) -> Tensor | None:
        """The law of one token given the history, float64 [S, V], from the answers of all models.

        The mean over the secret draw, for evaluation; nothing is sampled from it. None where it has no closed form:
        then `draw` and `release` give a sample of it.
        """
        return None

    def release_law(self, answers: Answers) -> Tensor:
        """The law of one token given the draw, float64 [S, V]: the mean of what `release` samples from over its noise.

        Raises:
            ValueError: the release is noisy, and its law is not computed.
        """
        if self.noisy:
            raise ValueError(f"the law of {self.name} over its noise is not computed")
        weights = self.release(answers).weights.double()
        return weights / weights.sum(dim=1, keepdim=True)

    def formula(self, public: Reals, rows: Reals) -> Reals | None:
        """The law of one token given the draw as the paper states it, float64 [V], without the code that serves.

        Audits compare the tokens that are released with it. None where `release_law` is the only statement of it.

        Args:
            public: float64 [V], probabilities of the public model.
            rows: float64 [n, V], probabilities of the n models drawn.
        """
        return None

    def chance_bounds(self, answers: Answers, tokens: Tensor) -> Reals | None:
        """Upper bounds, float64 [S], on the chances of int64 ``tokens`` [S], which evaluation takes for the chances.

        For protocols that release one noisy choice, whose weights say nothing of the other tokens. None: the weights
        of `release` are the chances.
        """
        return None

    @property
    def models(self) -> int:
        """How many models the ensemble has for this protocol."""
        return self.parts * (2 if self.halves else 1)

    @property
    def expected_rows(self) -> float:
        """How many part rows a token needs on average."""
        if self.rows is not None:
            return float(self.rows)
        return sum(count * chance for (count,), chance in self.draws((self.models,)).items())

    @property
    @abstractmethod
    def event(self) -> Event:
        """What one released token costs."""

    @property
    def guarantee(self) -> Guarantee:
        """What is promised for the released tokens, and under which assumptions."""
        return self.event.guarantee
