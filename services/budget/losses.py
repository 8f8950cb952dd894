"""Losses measured on the private text, added up for every part of the ensemble."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class Losses:
    """Rényi losses at the order of the ledger's terms, rounded up.

    `alike` is every part's; `parts` has what each part lost besides, by its index, which stays when an ensemble grows.
    """

    alike: float = 0.0
    parts: tuple[float, ...] = ()

    @property
    def largest(self) -> float:
        """That of the part which lost most."""
        return _sum_up(self.alike, max(self.parts, default=0.0))

    def plus(self, losses: Sequence[float]) -> "Losses":
        """With those of one more token: one number for every part alike, or one for each part."""
        if len(losses) == 1:
            return Losses(_sum_up(self.alike, losses[0]), self.parts)
        return Losses(self.alike, tuple(_sum_up(a, b) for a, b in zip_longest(self.parts, losses, fillvalue=0.0)))


NO_LOSSES = Losses()


def are_losses(losses: Sequence[float]) -> bool:
    """Whether these can be one token's: no negative number, and none that is no number."""
    return len(losses) > 0 and all(loss >= 0 and not math.isnan(loss) for loss in losses)


def _sum_up(a: float, b: float) -> float:
    """a + b, rounded up unless it is exact because one of them is 0."""
    return math.nextafter(a + b, math.inf) if a and b else a + b
