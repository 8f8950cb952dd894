"""Writes the terminals of JSON numbers within bounds, in short forms that every reader takes for the same number.

Integers have no fraction. Other numbers have at most 17 significant digits, which tell any two of float64 apart; 15 if
they must be multiples or no integers, because a reader may lose a fraction after more; or those of their bounds if that
is more. A number without a bound may have an exponent from -307 to 307, so that it is
never infinite. No number is `-0`, which some readers keep apart from 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

DIGITS = 17
SAFE_DIGITS = 15
"""The significant digits that float64 keeps: a fraction after more of them may be lost, or become another one."""
MAX_FRACTIONS = 1000
"""The maximum number of different fractions of a step, such as 100 for 0.01, that a terminal enumerates."""

_WHOLE = r"(?:0|[1-9][0-9]*)"
_EXPONENT = rf"[1-9](?:\.[0-9]{{1,{DIGITS - 1}}})?e[+-]?(?:[0-9]{{1,2}}|[12][0-9]{{2}}|30[0-6])"


@dataclass(frozen=True)
class Numbers:
    """Describes the JSON numbers between two bounds.

    Attributes:
        integer: None for all numbers, True for integers alone, False for the others alone.
        low, high: the bounds; None for none. `low_open` and `high_open` exclude them.
        steps: the numbers of which each number is a multiple.
    """

    integer: bool | None = None
    low: Decimal | None = None
    low_open: bool = False
    high: Decimal | None = None
    high_open: bool = False
    steps: frozenset[Fraction] = frozenset()

    def both(self, other: "Numbers") -> "Numbers | None":
        """Returns the numbers that are of both kinds; None if there are none."""
        integer = other.integer if self.integer is None else self.integer
        if other.integer is not None and integer != other.integer:
            return None
        low, low_open = _tighter(self.low, self.low_open, other.low, other.low_open, 1)
        high, high_open = _tighter(self.high, self.high_open, other.high, other.high_open, -1)
        met = Numbers(integer, low, low_open, high, high_open, self.steps | other.steps)
        return met if met.possible else None

    @property
    def possible(self) -> bool:
        low, high = self.low, self.high
        if low is None or high is None:
            return True
        if self.integer:
            return bool(self._whole_bounds())
        return low < high or (low == high and not self.low_open and not self.high_open)

    def _whole_bounds(self) -> range:
        """Returns the integers between two bounds."""
        assert self.low is not None
        assert self.high is not None
        first, last = math.ceil(self.low), math.floor(self.high)
        first += self.low_open and first == self.low
        last -= self.high_open and last == self.high
        return range(first, last + 1)

    def listed(self, most: int) -> list[int] | None:
        """Returns the integers if they are at most this number, or None."""
        if not self.integer or self.low is None or self.high is None:
            return None
        whole = self._whole_bounds()
        if len(whole) > most:
            return None
        return [number for number in whole if all(number % step == 0 for step in self.steps)]

    def mirrored(self) -> "Numbers":
        """Returns the negatives of these numbers."""
        low = None if self.high is None else self.high.copy_negate()  # `-` would round
        high = None if self.low is None else self.low.copy_negate()
        return replace(self, low=low, low_open=self.high_open, high=high, high_open=self.low_open)


def _tighter(
    one: Decimal | None, one_open: bool, other: Decimal | None, other_open: bool, sign: int
) -> tuple[Decimal | None, bool]:
    if one is None or other is None:
        return (other, other_open) if one is None else (one, one_open)
    if one == other:
        return one, one_open or other_open
    return (one, one_open) if (one > other) == (sign > 0) else (other, other_open)


def terminals(numbers: Numbers) -> Iterator[str]:
    """Yields expressions of the Lark format, which together match these numbers. A step must be a `fraction_step`."""
    for sign, side in (("", numbers), ('"-" ', numbers.mirrored())):
        positive = side.both(Numbers(low=Decimal(0), low_open=bool(sign)))
        if positive is not None:
            yield from (sign + magnitude for magnitude in _magnitudes(positive))


def fraction_step(step: Fraction) -> bool:
    """Tells whether the multiples of a step are those numbers whose fraction is in a small set."""
    digits, scale = _parts(step)
    return scale > 0 and 10**scale % digits == 0 and 10**scale // digits <= MAX_FRACTIONS


def common_step(steps: frozenset[Fraction]) -> Fraction | None:
    """Returns the step whose multiples are the multiples of all steps; None without steps."""
    if not steps:
        return None
    scale = max(_parts(step)[1] for step in steps)
    return Fraction(math.lcm(*(int(step * 10**scale) for step in steps)), 10**scale)


def places(step: Fraction) -> int:
    """Returns the number of decimal places of a step."""
    return _parts(step)[1]


def _parts(step: Fraction) -> tuple[int, int]:
    """Returns integers d and s: the step is d / 10**s, and s is the least one."""
    scale = 0
    while (step * 10**scale).denominator > 1:
        scale += 1
    return int(step * 10**scale), scale


def _magnitudes(numbers: Numbers) -> Iterator[str]:
    """Yields expressions of numbers from 0 on, whose lower bound is therefore not None."""
    low, high = numbers.low, numbers.high
    assert low is not None
    low = low.copy_abs()  # mirrored, 0 is -0
    if numbers.integer is None and high is None and low == 0 and not numbers.steps:
        yield f"/{_EXPONENT}/"
    fractions = numbers.integer is False or (numbers.steps and not numbers.integer)
    digits = SAFE_DIGITS if fractions else DIGITS
    most = max([digits, *(len(f"{bound:f}".replace(".", "")) for bound in (low, high) if bound is not None)])
    # The zero before a point is no significant digit.
    terms = [_WHOLE + ("" if numbers.integer else _fraction(numbers)), rf"(?:0\.)?(?:[0-9]\.?){{1,{most}}}"]
    if numbers.integer is False:
        terms.append(rf"{_WHOLE}\.[0-9]*[1-9][0-9]*")
    if low or numbers.low_open:
        terms.append(_at_least(low, numbers.low_open))
    if high is not None:
        high = high.copy_abs()
        terms.append(_at_most(high, numbers.high_open))
    yield "(" + " & ".join(f"/{term}/" for term in terms) + ")"


def _fraction(numbers: Numbers) -> str:
    step = common_step(numbers.steps)
    if step is None:
        return r"(?:\.[0-9]+)?"
    digits, scale = _parts(step)
    endings = {str(multiple).zfill(scale).rstrip("0") for multiple in range(0, 10**scale, digits)} - {""}
    return r"(?:\.(?:" + "|".join([*(f"{ending}0*" for ending in sorted(endings)), "0+"]) + "))?"


def _at_least(bound: Decimal, strict: bool) -> str:
    whole, fraction = _split(bound)
    ends = [rf"\.{fraction[:place]}{_digit(int(digit) + 1, 9)}[0-9]*" for place, digit in enumerate(fraction)]
    ends = [end for end in ends if "!" not in end]
    if strict:
        ends.append(rf"\.{fraction}0*[1-9][0-9]*")
    else:
        ends.append(rf"\.{fraction}[0-9]*" if fraction else r"(?:\.[0-9]+)?")
    greater = [_any_fraction(text) for text in _above(whole)]
    return "|".join([f"{whole}(?:{'|'.join(ends)})", *greater])


def _at_most(bound: Decimal, strict: bool) -> str:
    whole, fraction = _split(bound)
    ends = [rf"\.{fraction[:place]}{_digit(0, int(digit) - 1)}[0-9]*" for place, digit in enumerate(fraction)]
    ends = [end for end in ends if "!" not in end]
    ends += [rf"\.{fraction[:place]}" for place in range(1, len(fraction))]
    if fraction:
        ends.append("")
    if not strict:
        ends.append(rf"\.{fraction}0*" if fraction else r"(?:\.0+)?")
    equal = [f"{whole}(?:{'|'.join(ends)})"] if ends else []
    return "|".join([*equal, *(_any_fraction(text) for text in _below(whole))]) or "[^0-9]"


def _any_fraction(whole: str) -> str:
    return rf"{whole}(?:\.[0-9]+)?"


def _split(bound: Decimal) -> tuple[str, str]:
    whole, _, fraction = f"{bound:f}".partition(".")
    return whole, fraction.rstrip("0")


def _digit(least: int, most: int) -> str:
    return "!" if least > most else f"[{least}-{most}]"


def _above(whole: str) -> list[str]:
    """Returns expressions of the integers above one."""
    found = [f"[1-9][0-9]{{{len(whole)},}}"]
    for place, digit in enumerate(whole):
        if digit != "9":
            found.append(f"{whole[:place]}[{int(digit) + 1}-9][0-9]{{{len(whole) - place - 1}}}")
    return found


def _below(whole: str) -> list[str]:
    """Returns expressions of the integers from 0 on that are below one."""
    found = [f"[1-9][0-9]{{0,{len(whole) - 2}}}", "0"] if len(whole) > 1 else []
    for place, digit in enumerate(whole):
        least = 1 if place == 0 and len(whole) > 1 else 0
        if int(digit) - 1 >= least:
            found.append(f"{whole[:place]}[{least}-{int(digit) - 1}][0-9]{{{len(whole) - place - 1}}}")
    return found
