"""Claim: one meaning is one user in every type that a format has, and no user shares a rounded number with another."""

import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from privmix.foundation.identifiers import LONGEST, identifier
from privmix.foundation.json_lines import BadRow

ONE: dict[str, list[Any]] = {
    "7": [
        *(7, 7.0, "7", " 7 ", "7.0", "7.000", b"7"),
        *(Decimal(7), Decimal("7.00"), np.int64(7), np.float32(7), np.uint8(7)),
    ],
    "0": [0, -0.0, "0", "-0", "-0.0", Decimal("-0")],
    "-12": [-12, -12.0, "-12", "-12.0"],
    "9007199254740993": [2**53 + 1, "9007199254740993", Decimal(2**53 + 1), np.uint64(2**53 + 1)],
    "9007199254740991": [2.0**53 - 1, "9007199254740991.0"],
    "0001": ["0001", b"0001 "],
    "01.0": ["01.0"],
    "1.50": ["1.50"],
    "José": ["Jos\u00e9", "Jose\u0301", "Jose\u0301".encode()],
    "2026-11-29": [date(2026, 11, 29), "2026-11-29"],
    "12345678-1234-5678-1234-567812345678": [uuid.UUID("12345678" * 4)],
}


@pytest.mark.parametrize(("text", "values"), ONE.items())
def test_one_meaning_is_one_text(text: str, values: list[Any]) -> None:
    assert [identifier(value) for value in values] == [text] * len(values)


REFUSED: dict[str, list[Any]] = {
    "names no user": [None, "", float("nan"), np.float32("nan"), Decimal("nan"), "nan", "None", "NULL", " <NA> "],
    "is blank": [" \n"],
    "is neither text nor a whole number": [
        *(True, np.bool_(False), 1.5, Decimal("1.5"), float("inf"), Decimal("inf"), [7], datetime(2026, 11, 29))
    ],
    "is a number that was rounded": [
        *(2.0**53, -(2.0**53), 1.582218195625939e18, "9007199254740992.0", "1.58E+18", "1e+20", "9" * 999 + ".0"),
        *(np.float32(2**24), np.float16(2**11)),
    ],
    "is too long": ["x" * (LONGEST + 1), "9" * 5000 + ".0"],
    "is binary": [b"\xff" * 16],
    "is not UTF-8": ["a\udcff"],
    "has half of a surrogate pair": ["a\ud800"],
}


@pytest.mark.parametrize(
    ("problem", "value"), [(problem, value) for problem, some in REFUSED.items() for value in some]
)
def test_what_identifies_nobody_is_refused_without_a_quotation(problem: str, value: Any) -> None:
    with pytest.raises(BadRow) as refused:
        identifier(value, "user")
    assert refused.value.problem.startswith(problem)
    assert refused.value.field == "user"
