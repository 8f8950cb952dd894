"""What one step could release, before it is known how much of it is paid for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from services.coordinator.ensemble import Rows
from services.privacy.mollifiers.shaping import SamplingOptions, shape
from services.privacy.protocol import Answers, Protocol
from services.privacy.sampling.categorical import quantise, sample


@dataclass(frozen=True)
class PendingRelease:
    """Weights for consecutive sequences of a step.

    Attributes:
        public: float32 [S, V], the public model's probabilities.
        private: the indices of the sequences that the protocol answers, in order.
        weights: int64 [len(private), V], what the protocol releases to these.
        losses: for each of these what its token costs; None where that does not depend on the answers.
    """

    public: Tensor
    private: tuple[int, ...]
    weights: Tensor | None
    losses: list[list[float]] | None

    @classmethod
    def of(cls, protocol: Protocol, rows: Rows, options: Sequence[SamplingOptions], device: str) -> Self:
        """Shape the rows and let the protocol answer its sequences, on a device of PyTorch's."""
        answers = shape(*rows.tensors(device), rows.models, options, overwrite_parts=True)
        private = [index for index, one in enumerate(rows.private) if one]
        if not private:
            return cls(answers.public, (), None, None)
        if len(private) < len(rows.models):
            models = tuple(answers.models[index] for index in private)
            release = protocol.release(Answers(answers.public[private], answers.ratios, models))
        else:
            release = protocol.release(answers)
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
