"""Chooses the tokens that receive noise: the most likely tokens of the public model, which depend on p0 alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from privmix.foundation.lazily import torch
from privmix.privacy.protocol import Answers

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Holds the most likely tokens of each of S sequences, in descending order.

    Attributes:
        tokens: int64 [S, k]. k is smaller than requested if the vocabulary is smaller.
        kept: bool [S, k], false for tokens outside the kept set, which must not be released.
    """

    tokens: Tensor
    kept: Tensor

    @classmethod
    def of(cls, public: Tensor, count: int) -> Candidates:
        """Returns the ``count`` most likely tokens under p0 [S, V]."""
        likeliest = public.topk(min(count, public.shape[1]), dim=1)
        return cls(likeliest.indices, likeliest.values > 0)

    def probabilities(self, answers: Answers) -> Tensor:
        """Returns p_i of the candidates, float64 [R, k]."""
        owners = sequences(answers)
        chosen = self.tokens[owners]
        return answers.ratios.gather(1, chosen).double() * answers.public.gather(1, self.tokens).double()[owners]


def sequences(answers: Answers) -> Tensor:
    """Returns the sequence of each row, int64 [R]."""
    lengths = torch.tensor([len(models) for models in answers.models], device=answers.ratios.device)
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
