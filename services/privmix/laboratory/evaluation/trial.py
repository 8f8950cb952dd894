"""Runs one protocol over the positions of one run: it draws, answers and pays like a service.

If a budget lasts for more tokens than a run has positions, the run represents a text that repeats it: each position is
charged several times.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privmix.budget.filter import counted
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.laboratory.evaluation.in_memory import InMemoryBudget
from privmix.laboratory.evaluation.rows import RowReader
from privmix.privacy.arrays import Reals
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Answers, Protocol
from privmix.privacy.protocols.adapmixed import AdaPMixed, screening_rdp
from privmix.privacy.protocols.public import Public
from privmix.privacy.settings import Settings

_POSITIONS_AT_ONCE = 32
CONTEXTS = ((1, 16), (17, 64), (65, 128), (129, 256))
"""The ranges of the number of tokens before a position for which results are shown."""
# The maximum number of log-probabilities in a batch, which several passes process.
_VALUES_AT_ONCE = 2**25


@dataclass(frozen=True)
class MeasuredLosses:
    """Holds the Rényi losses that a run measured on the private text, at the protocol's order.

    Attributes:
        quarters: the sum, of the part with the largest, after each quarter of the answered tokens.
        screened: the fraction of them that AdaPMixED's screening gave to the public model; None without a screening.
        screening: the loss of the screening itself, of all of them; None likewise.
    """

    quarters: tuple[float, ...]
    screened: float | None = None
    screening: float | None = None


@dataclass(frozen=True)
class TrialResult:
    """Holds the result of one run of one protocol. It is private, like all measurements on private models.

    Attributes:
        positions: the number of evaluated tokens.
        answered: the number of tokens that the protocol answered. The public model answered the others, after the
            budget was used up.
        charged: the number of charged tokens.
        possible: the number of true tokens with a positive probability.
        loss: the mean of -log p, in nats, over the possible tokens.
        asked: the mean number of part models queried for a token.
        epsilon: the epsilon of the answered tokens at the ledger's order; None if it is unbounded.
        contexts: for each range of `CONTEXTS`, the number of possible tokens with so many tokens before them, and the
            sum of their -log p in nats.
        losses: those that were measured; None if the protocol measures none.
    """

    positions: int
    answered: int
    charged: int
    possible: int
    loss: float
    asked: float
    epsilon: float | None
    contexts: tuple[tuple[int, float], ...] = ()
    losses: MeasuredLosses | None = None


@dataclass(frozen=True)
class Targets:
    """Describes the true tokens at S positions.

    Attributes:
        tokens: int64 [S].
        contexts: the number of tokens before each of them, int64 [S].
        counted: which of them the public model can release, bool [S]. Others count for no method.
    """

    tokens: Tensor
    contexts: NDArray[np.int64]
    counted: NDArray[np.bool_]


class Trial:
    """Computes an `TrialResult` from batches of positions, in the order in which a service would release the tokens.

    Args:
        positions: the total number of positions.
        released: the number of tokens that they stand for; by default those that the budget should last for.
        bounds: whether to take upper bounds of the probabilities from a protocol that gives them, or to draw its noise.
    """

    def __init__(
        self,
        settings: Settings,
        protocol: Protocol,
        positions: int,
        released: int | None = None,
        *,
        bounds: bool = True,
    ) -> None:
        self._protocol = protocol
        self._bounds = bounds
        self._public = Public(protocol.parts)
        self._budget = InMemoryBudget(_terms(settings, protocol), protocol.event)
        self._repeats = max(1, (released or settings.tokens) // positions)
        self._answered = 0
        self._chances: list[Reals] = []
        self._targets: list[Targets] = []
        self._losses: list[Reals] = []
        self._asked = 0

    def add(self, answers: Answers, targets: Targets) -> None:
        """Adds a batch of S positions: the answers of all models, and the true tokens."""
        tokens = targets.tokens
        self._targets.append(targets)
        reserved = self._budget.reserve(self._repeats * len(tokens)) // self._repeats
        draws = [self._protocol.draw() for _ in range(reserved)]
        drawn = _select(answers, draws)
        private, losses = np.empty(0), None
        if draws:
            private, losses = self._private_chances(answers, drawn, tokens[: len(draws)])
        answered = reserved
        if losses is not None:
            answered = self._budget.charge(losses.repeat(self._repeats, axis=0).tolist()) // self._repeats
            self._losses.append(losses[:answered])
        self._answered += answered
        self._asked += sum(map(len, draws))
        self._chances += [private[:answered], self._public_chances(answers, tokens, answered)]

    @property
    def chances(self) -> Reals:
        """The probability of each true token so far, float64 [positions]."""
        return np.concatenate(self._chances)

    def outcome(self) -> TrialResult:
        with np.errstate(divide="ignore"):
            logs = np.log(self.chances)
        possible = np.isfinite(logs) & np.concatenate([targets.counted for targets in self._targets])
        contexts = np.concatenate([targets.contexts for targets in self._targets])
        epsilon = self._budget.epsilon
        return TrialResult(
            positions=len(logs),
            answered=self._answered,
            charged=self._budget.charged,
            possible=int(possible.sum()),
            loss=float(-logs[possible].mean()) if possible.any() else math.inf,
            asked=self._asked / len(logs),
            epsilon=epsilon if math.isfinite(epsilon) else None,
            contexts=tuple(_sum_in(first, last, contexts[possible], -logs[possible]) for first, last in CONTEXTS),
            losses=self._measured(),
        )

    def _measured(self) -> MeasuredLosses | None:
        losses = np.concatenate(self._losses) if self._answered and self._losses else np.empty((0, 1))
        if not len(losses):
            return None
        ends = len(losses) * np.arange(1, 5) // 4
        quarters = tuple(self._repeats * float(losses[:end].sum(axis=0).max()) for end in ends)
        if not isinstance(self._protocol, AdaPMixed):
            return MeasuredLosses(quarters)
        own = self._protocol
        screening = float(screening_rdp(own.parts, own.sigma, own.mix, [own.order])[0])
        screened = float((losses <= screening).mean())
        return MeasuredLosses(quarters, screened, screening * self._repeats * len(losses))

    def _private_chances(self, answers: Answers, drawn: Answers, tokens: Tensor) -> tuple[Reals, Reals | None]:
        """Returns the tokens' probabilities, or upper bounds if the protocol gives only those, and their losses."""
        bounds = self._protocol.chance_bounds(drawn, tokens) if self._bounds else None
        if bounds is not None:
            return bounds
        if self._protocol.event.accounts:
            return _chances(self._released_from_accounts(drawn), tokens), None
        weights, losses = self._released(answers, drawn)
        return _chances(weights, tokens), losses

    def _released(self, answers: Answers, drawn: Answers) -> tuple[Tensor, Reals | None]:
        """Returns the tokens' weights and losses, from the law of the protocol if it is known, else from the draw."""
        law = self._protocol.law(answers.first(len(drawn.models)))
        if law is not None:
            return law, None
        release = self._protocol.distribution(drawn)
        return release.weights, release.losses

    def _released_from_accounts(self, drawn: Answers) -> Tensor:
        """Returns the tokens' weights, and charges each of them, as often as it stands for, to the parts' accounts."""
        weights, end = [], 0
        while end < len(drawn.models):
            first, wanted = end, self._repeats * (len(drawn.models) - end)
            count, allowance = self._budget.allowances(self._protocol.models, wanted, least=self._repeats)
            end += count // self._repeats
            answers = replace(drawn.between(first, end), allowances=torch.tensor([allowance] * (end - first)))
            release = self._protocol.distribution(answers)
            assert release.charges is not None
            charges = self._repeats * release.charges.sum(dim=0)
            self._budget.charge_accounts(self._repeats * (end - first), charges.tolist())
            weights.append(release.weights)
        return torch.cat(weights)

    def _public_chances(self, answers: Answers, tokens: Tensor, first: int) -> Reals:
        """Returns the public model's probabilities of the tokens from `first` on, after the budget is used up."""
        left = answers.public[first:]
        if not len(left):
            return np.empty(0)
        return _chances(
            self._public.distribution(Answers(left, answers.ratios[:0], ((),) * len(left))).weights, tokens[first:]
        )


@lru_cache(maxsize=64)
def _terms(settings: Settings, protocol: Protocol) -> PrivacyBudget:
    base = next(iter(settings.spent_before), None)
    return counted(PrivacyBudget.of("evaluation", settings, protocol, base=base), protocol.event, settings.planned)


def run_trials(
    planned: Sequence[tuple[Settings, Protocol]],
    reader: RowReader,
    positions: NDArray[np.int64],
    tokens: NDArray[np.int64],
    contexts: NDArray[np.int64] | None = None,
    released: int | None = None,
) -> list[TrialResult]:
    """Runs several protocols of one ensemble on one run. Reads and shapes the rows once for all of them.

    Args:
        planned: settings and their protocols.
        reader: reads the rows of the models from which all protocols draw: those of parts, or of half-parts.
        positions: the positions of the run, in order.
        tokens: the true token at each position, int64.
        contexts: the number of tokens before each position, int64; by default none.
        released: see `Trial`.
    """
    contexts = np.zeros_like(tokens) if contexts is None else contexts
    trials = [Trial(settings, protocol, len(positions), released) for settings, protocol in planned]
    for batch in _batches(positions, reader.rows, reader.vocabulary):
        public, rows = reader(positions[batch])
        true = torch.from_numpy(tokens[batch])
        targets = Targets(true, contexts[batch], _releasable(reader.original(positions[batch]), true))
        everyone = (tuple(range(reader.rows)),) * len(public)
        answers = shape(public, rows, everyone, overwrite_parts=True)
        for trial in trials:
            trial.add(answers, targets)
    return [trial.outcome() for trial in trials]


def _releasable(original: Tensor | None, tokens: Tensor) -> NDArray[np.bool_]:
    """Returns which tokens the public model under a private base can release: all without such a base, bool [S]."""
    if original is None:
        return np.ones(len(tokens), np.bool_)
    answers = shape(original, original[:0], ((),) * len(tokens))
    return _chances(Public(2).distribution(answers).weights, tokens) > 0


def _sum_in(first: int, last: int, contexts: NDArray[np.int64], losses: Reals) -> tuple[int, float]:
    within = (first <= contexts) & (contexts <= last)
    return int(within.sum()), float(losses[within].sum())


def _batches(positions: NDArray[np.int64], models: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, min(_POSITIONS_AT_ONCE, _VALUES_AT_ONCE // max(1, models * vocabulary)))
    for start in range(0, len(positions), size):
        yield slice(start, start + size)


def _select(answers: Answers, draws: Sequence[tuple[int, ...]]) -> Answers:
    """Selects, for each of the first positions, the answers of its drawn models."""
    if all(drawn == models for drawn, models in zip(draws, answers.models, strict=False)):
        return answers.first(len(draws))
    spans = zip(answers.spans(), draws, strict=False)
    rows_drawn = [first + model for (first, _), drawn in spans for model in drawn]
    return Answers(answers.public[: len(draws)], answers.ratios[rows_drawn], tuple(draws))


def _chances(weights: Tensor, tokens: Tensor) -> Reals:
    """Returns the probability of each token under weights [S, V], float64 [S]."""
    own = weights.gather(1, tokens[:, None])[:, 0].double()
    return np.asarray((own / weights.sum(dim=1).double()).numpy())
