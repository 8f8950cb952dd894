"""Holds the output distributions of a step until the budget says which sequences are paid for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from privmix.coordinator.step import Step
from privmix.foundation.lazily import torch
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Protocol
from privmix.privacy.sampling.categorical import quantise, sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PendingRelease:
    """Holds the sampling weights of S consecutive sequences of a step, of which the first P are private.

    Attributes:
        public: float32 [S, V], the public model's probabilities.
        weights: int64 [P, V], the protocol's sampling weights for the private sequences; None if there are none.
        losses: the cost of each of these tokens; None if the cost does not depend on the models' output.
    """

    public: Tensor
    weights: Tensor | None = None
    losses: list[list[float]] | None = None

    @classmethod
    def of(
        cls, protocol: Protocol, step: Step, public: Sequence[np.ndarray], drawn: Sequence[np.ndarray], device: str
    ) -> Self:
        """Shapes the rows and computes the protocol's release for the private sequences, on a PyTorch device.

        Args:
            public: float32 [V], the logits of each sequence's public row.
            drawn: those of each drawn model, grouped by private sequence.
        """
        rows = np.stack(drawn) if drawn else np.empty((0, *public[0].shape), np.float32)
        log_p0, log_p = (torch.from_numpy(values).to(device) for values in (np.stack(public), rows))
        models = (*step.draws, *[()] * (len(step.sequences) - step.private))
        answers = shape(log_p0, log_p, models, step.options, overwrite_parts=True)
        if not step.private:
            return cls(answers.public)
        release = protocol.distribution(answers.first(step.private))
        losses = None if release.losses is None else release.losses.tolist()
        return cls(answers.public, release.weights, losses)

    def sample(self, paid: Collection[int], free: Collection[int]) -> dict[int, int]:
        """Samples the tokens of some sequences, and no others. Call it for tokens that are paid for.

        Args:
            paid: indices of private sequences: their tokens come from the protocol's weights.
            free: indices of sequences whose tokens come from p0.
        """
        tokens: dict[int, int] = {}
        rows = sorted(paid)
        if rows and self.weights is not None:
            weights = self.weights if len(rows) == len(self.weights) else self.weights[rows]
            tokens |= zip(rows, sample(weights), strict=True)
        if free:
            public = sorted(free)
            tokens |= zip(public, sample(quantise(self.public[public])), strict=True)
        return tokens
