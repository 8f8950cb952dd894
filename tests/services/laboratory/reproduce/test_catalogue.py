"""Claim: what the papers print and needs no corpus agrees with what we compute, to its digits, or the data say why."""

import pytest

from privmix.laboratory.reproduce.catalogue import Number, agrees, load

NUMBERS = [
    pytest.param(number, id=f"{name}/{item}: {number.of}", marks=[pytest.mark.slow] if number.slow else [])
    for name, paper in load().items()
    for item, found in paper.items.items()
    for number in found.numbers
]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_printed_number_agrees_or_the_catalogue_says_why_not(number: Number) -> None:
    row = number.row()
    if number.why is None:
        assert row["agrees"] is not False
    elif not number.slow:  # what is trained varies
        assert row["agrees"] is not True, "the reason is out of date"


@pytest.mark.parametrize(
    ("printed", "ours", "expected"),
    [
        ("0.002", 0.00175, True),
        ("0.002", 0.00149, False),
        ("0.0018", 0.00175, True),
        ("0.0018", 0.00174, False),
        ("5.0e4", 49_950.0, True),
        ("5.0e4", 48_950.0, False),
        ("8", float("inf"), False),
        ("<= 8", 8.01, False),
        (">= 0.94", 0.94, True),
        ("unbounded", 500.0, False),
    ],
)
def test_the_printed_digits_say_how_closely_ours_must_agree(printed: str, ours: float, expected: bool) -> None:
    assert agrees(printed, ours) is expected
