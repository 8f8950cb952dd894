"""Holds the output distributions of a step until the budget says which sequences are paid for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from services.coordinator.ensemble import PartialSums, Rows
from services.lazily import torch
from services.privacy.mollifiers.shaping import SamplingOptions, shape
from services.privacy.protocol import Answers, Protocol, Release
from services.privacy.sampling.categorical import quantise, sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PendingRelease:
    """Holds the sampling weights of consecutive sequences of a step.

    Attributes:
        public: float32 [S, V], the public model's probabilities.
        private: the indices of the sequences that the protocol answers, ascending.
        weights: int64 [len(private), V], the protocol's sampling weights for these sequences.
        losses: the cost of each of these tokens; None if the cost does not depend on the models' output.
        charges: what each of these tokens charges to each part's account, int64 [len(private), parts]; None without
            accounts.
    """

    public: Tensor
    private: tuple[int, ...]
    weights: Tensor | None
    losses: list[list[float]] | None
    charges: list[tuple[int, ...]] | None = None

    @classmethod
    def of(
        cls,
        protocol: Protocol,
        rows: Rows,
        options: Sequence[SamplingOptions],
        device: str,
        allowances: Sequence[Sequence[int]] = (),
    ) -> Self:
        """Shapes the rows and computes the protocol's release for the private sequences, on a PyTorch device.

        Args:
            allowances: what the token of each private sequence may charge to each part's account, for an event with
                accounts.
        """
        answers = shape(*rows.tensors(device), rows.models, options, overwrite_parts=True)
        private = [index for index, is_private in enumerate(rows.private) if is_private]
        if not private:
            return cls(answers.public, (), None, None)
        if len(private) < len(rows.models):
            models = tuple(answers.models[index] for index in private)
            private_answers = Answers(answers.public[private], answers.ratios, models)
        else:
            private_answers = answers
        if protocol.event.accounts:
            granted = torch.tensor(allowances, dtype=torch.int64, device=answers.public.device)
            private_answers = replace(private_answers, allowances=granted)
        return cls._of(answers.public, tuple(private), protocol.distribution(private_answers))

    @classmethod
    def combined(cls, protocol: Protocol, partials: PartialSums, device: str) -> Self:
        """Adds up the groups' partials and computes the protocol's release from them, on a PyTorch device.

        Raises:
            ValueError: see `Protocol.added`.
        """
        public = torch.from_numpy(np.stack(partials.public)).to(device)
        private = [index for index, is_private in enumerate(partials.private) if is_private]
        if not private:
            return cls(public, (), None, None)
        groups = [torch.from_numpy(np.stack(group)).to(device) for group in zip(*partials.sums, strict=True)]
        sums = protocol.added(groups)
        charges = torch.from_numpy(np.stack(partials.charges)) if partials.charges else None
        return cls._of(public, tuple(private), protocol.combine(public[private], sums, charges))

    @classmethod
    def _of(cls, public: Tensor, private: tuple[int, ...], release: Release) -> Self:
        losses = None if release.losses is None else release.losses.tolist()
        charges = None if release.charges is None else list(map(tuple, release.charges.tolist()))
        return cls(public, private, release.weights, losses, charges)

    def sample(self, paid: Collection[int], free: Collection[int]) -> dict[int, int]:
        """Samples the tokens of some sequences, and no others. Call it for tokens that are paid for.

        Args:
            paid: indices in `private`: their tokens come from the protocol's weights.
            free: indices of sequences whose tokens come from p0.
        """
        tokens: dict[int, int] = {}
        rows = [row for row, index in enumerate(self.private) if index in paid]
        if rows and self.weights is not None:
            weights = self.weights if len(rows) == len(self.private) else self.weights[rows]
            tokens |= zip([self.private[row] for row in rows], sample(weights), strict=True)
        if free:
            public = sorted(free)
            tokens |= zip(public, sample(quantise(self.public[public])), strict=True)
        return tokens
