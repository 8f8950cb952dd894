"""Defines a step, which makes one token of each live sequence, and what the shards make of it.

`Step` is all that the coordinator fixes before the shards compute; `StepResult` is all that it sees afterwards. How the
rows become a result is chosen once for an ensemble (`privmix.coordinator.ensemble`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions


@dataclass(frozen=True, slots=True)
class Step:
    """Holds what is fixed before the shards compute one token of each of S sequences.

    The protocol answers the first P sequences, and the public model alone answers the others.

    Attributes:
        sequences: the id of each sequence.
        contexts: the tokens of each sequence, prompt and output. They may grow after the step.
        lengths: how many of these tokens the step continues. The last one may be unknown here while a shard picks it.
        cache_salts: see `privmix.engine.engine.Request`.
        options: the sampling options of each sequence.
        draws: the models drawn for the token of each of the first P sequences.
        allowances: int64 [P, parts], the most that each of these tokens may charge to each part; None without accounts.
    """

    sequences: tuple[str, ...]
    contexts: tuple[Sequence[int], ...]
    lengths: tuple[int, ...]
    cache_salts: tuple[str | None, ...]
    options: tuple[SamplingOptions, ...]
    draws: tuple[tuple[int, ...], ...]
    allowances: NDArray[np.int64] | None = None

    @property
    def private(self) -> int:
        """P, the number of sequences that the protocol answers."""
        return len(self.draws)

    def of(self, places: Sequence[int]) -> Step:
        """Returns the step of some of the sequences, given by their places in ascending order."""
        private = [place for place in places if place < self.private]
        return Step(
            tuple(self.sequences[place] for place in places),
            tuple(self.contexts[place] for place in places),
            tuple(self.lengths[place] for place in places),
            tuple(self.cache_salts[place] for place in places),
            tuple(self.options[place] for place in places),
            tuple(self.draws[place] for place in private),
            None if self.allowances is None else self.allowances[private],
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Holds what the tokens of a step cost beyond their number. It is private: only the ledger may see it.

    Attributes:
        losses: of each private sequence (`Release.losses`); empty if the cost does not depend on the models' output.
        charges: what the token of each private sequence charges to each part; empty without accounts.
    """

    losses: Sequence[Sequence[float]] = ()
    charges: Sequence[tuple[int, ...]] = ()


Tokens = dict[int, int]
"""Sampled tokens by their places in a step."""


class PartlySampled(CoordinatorUnavailable):
    """Reports that a shard did not name its tokens of a step, while others did.

    Attributes:
        tokens: those of the others.
    """

    def __init__(self, cause: BaseException, tokens: Tokens) -> None:
        super().__init__(str(cause))
        self.tokens = tokens


@dataclass(frozen=True)
class StepResult(ABC):
    """Holds what the shards computed for a step: first it is mixed, then paid for, and then sampled from.

    Attributes:
        computed: the number of rows that the shards computed, padding included.
        received: the number of bytes that left the shards.
    """

    step: Step
    computed: int
    received: int

    @abstractmethod
    async def mix(self) -> Costs:
        """Computes the sampling weights and returns their costs. A noisy protocol draws its noise here.

        Call it once, when it is settled who pays.
        """

    @abstractmethod
    def sample(self, paid: Collection[int], free: Collection[int]) -> Awaitable[Tokens]:
        """Samples the tokens of some sequences after `mix`, and no others. Returns what waits for them.

        Call it once, for tokens that are paid for. If shards sample, they are asked within the loop's next turn.

        Args:
            paid: places of private sequences, whose tokens come from the protocol's weights.
            free: places of sequences whose tokens come from p0: public ones, or private ones that are not paid for.

        Raises:
            PartlySampled: the same, but other shards have answered.
            CoordinatorUnavailable: a shard failed, did not answer in time, or has lost the weights. The tokens count as
                sampled.
        """
