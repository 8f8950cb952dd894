"""What one step could release, before it is known how much of it is paid for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from services.privacy.protocol import Answers, Protocol
from services.privacy.sampling import quantise, sample


@dataclass(frozen=True)
class PendingRelease:
    """Weights for every sequence of a step.

    Attributes:
        public: float32 [S, V], the public model's probabilities.
        private: the sequences that the protocol answers, in their order.
        weights: int64 [len(private), V], what the protocol releases to these.
        losses: for each of these what its token costs; None where that does not depend on the answers.
    """

    public: Tensor
    private: tuple[int, ...]
    weights: Tensor | None
    losses: list[list[float]] | None

    @classmethod
    def of(cls, protocol: Protocol, answers: Answers, private: Sequence[int]) -> Self:
        """What `protocol` releases to the sequences in `private`; no model was asked for the others."""
        if not private:
            return cls(answers.public, (), None, None)
        asked = answers
        if len(private) < len(answers.models):
            models = tuple(answers.models[index] for index in private)
            asked = Answers(answers.public[list(private)], answers.ratios, models)
        release = protocol.release(asked)
        losses = None if release.losses is None else release.losses.tolist()
        return cls(answers.public, tuple(private), release.weights, losses)

    def sample(self, granted: int) -> list[int]:
        """One token for each sequence: the first `granted` of `private` by the protocol, all others by p0 alone."""
        paid = self.private[:granted]
        tokens = dict(zip(paid, sample(self.weights[:granted]), strict=True)) if self.weights is not None else {}
        unpaid = [index for index in range(len(self.public)) if index not in tokens]
        if unpaid:
            tokens |= zip(unpaid, sample(quantise(self.public[unpaid])), strict=True)
        return [tokens[index] for index in range(len(self.public))]
