"""Keeps one account for each part, and divides what is left of it among tokens.

An account holds `WHOLE` grains. A lease sets an amount aside for each of its tokens (the allowance), so that every
charge is durable before its token leaves; settling the lease keeps what its tokens did charge. The allowance of a part
depends on its own account and on public numbers alone, as the guarantee requires. A lease is never refused: the
allowance of an empty account is 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from privmix.privacy.protocols.individual import HEADROOM, WHOLE

# The fraction of an account that is kept for tokens after the horizon, of which there can be any number.
_KEPT = 1 / 8
# The fraction of an account that one lease may set aside is 1 / this, about.
_LEASES = 4
# By how much a part that spent more or less than planned changes its pace, at most, and how early.
_FASTER, _SLOWER, _START = 8.0, 0.125, 1 / 32

Grains = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Accounts:
    """Holds the grains that each part was charged, and those that open leases hold, by its index.

    Indices do not change when the ensemble grows. A part without an entry has a full account.
    """

    charged: Grains = ()
    held: Grains = ()

    def left(self, part: int) -> int:
        """The grains that nothing was set aside for."""
        return max(0, WHOLE - _at(self.charged, part) - _at(self.held, part))

    def hold(self, amounts: Sequence[int]) -> "Accounts":
        """Sets amounts aside for a lease."""
        if not amounts:
            return self
        return Accounts(self.charged, _sum(self.held, amounts))

    def settle(self, held: Sequence[int], charges: Sequence[int]) -> "Accounts":
        """Ends a lease: keeps its charges, and frees the rest of what it held."""
        if not held and not charges:
            return self
        return Accounts(_sum(self.charged, charges), _sum(self.held, [-amount for amount in held]))

    def divide(self, parts: int, tokens: int, horizon: int, wanted: int) -> tuple[int, Grains]:
        """Returns how many tokens a lease gets, and the allowance of each token, in grains, by part.

        Args:
            parts: the number of parts that are served.
            tokens: the number of tokens released so far.
            horizon: the number of tokens over which accounts should last.
            wanted: the number of tokens that the lease should have.
        """
        planned = _planned(tokens, horizon)
        count = min(wanted, max(1, planned // (_LEASES * HEADROOM)))
        return count, self.allowances(parts, tokens, horizon, count)

    def allowances(self, parts: int, tokens: int, horizon: int, count: int) -> Grains:
        """Returns the allowance of each of `count` tokens, in grains, by part. All of them together are affordable."""
        planned = _planned(tokens, horizon)
        return tuple(
            min(
                int(HEADROOM * (WHOLE - _at(self.charged, part)) / planned * self._pace(part, tokens, horizon)),
                self.left(part) // (2 * count),
            )
            for part in range(parts)
        )

    def largest(self, parts: int, first: int, last: int, horizon: int, count: int) -> Grains:
        """Returns the most that `count` unknown tokens can have charged, by part.

        An allowance never exceeds `HEADROOM` times the fastest pace of what was left before them.

        Args:
            parts: the number of parts of the partition. A part without an entry may have been served since.
            first, last: the number of tokens released before the unknown ones, and the most with them and all others.
        """
        most = HEADROOM * _FASTER / _shortest(first, last, horizon)
        return tuple(
            min(self.left(part), int((WHOLE - _at(self.charged, part)) * most * count) + count) for part in range(parts)
        )

    def _pace(self, part: int, tokens: int, horizon: int) -> float:
        """Returns a factor above 1 for a part that spent less than planned, and below 1 for one that spent more."""
        spent, planned = _at(self.charged, part) / WHOLE, _spent(tokens, horizon)
        # The first ratio tells more while little is spent, the second while little is left.
        by_spent, by_left = (planned + _START) / (spent + _START), (1 - spent) / (1 - planned)
        return min(_FASTER, max(_SLOWER, by_spent**2 * by_left**4))


NO_ACCOUNTS = Accounts()


def _spent(tokens: int, horizon: int) -> float:
    """Returns the fraction of an account that these tokens should have charged."""
    return (1 - _KEPT) * tokens / horizon if tokens < horizon else 1 - _KEPT * horizon / tokens


def _planned(tokens: int, horizon: int) -> int:
    """Returns for how many tokens what is left should last at the pace of the next one.

    After the horizon the pace falls with the square of the number of tokens, so what is left falls with that number.
    """
    return max(1, math.ceil(horizon / (1 - _KEPT)) - tokens if tokens < horizon else tokens)


def _shortest(first: int, last: int, horizon: int) -> int:
    """Returns the smallest `_planned` from the first to the last number of tokens. It falls up to the horizon."""
    return _planned(max(first, min(last, horizon - 1)), horizon)


def _at(grains: Grains, part: int) -> int:
    return grains[part] if part < len(grains) else 0


def _sum(first: Sequence[int], second: Sequence[int]) -> Grains:
    if not first or not second:
        return tuple(first or second)
    return tuple(a + b for a, b in zip_longest(first, second, fillvalue=0))
