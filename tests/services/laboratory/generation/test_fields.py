"""Claim: the report of the fields has the shares, the dependence and the lengths of a known distribution."""

from typing import Any

import pytest

from privmix.laboratory.generation.fields import describe, variation

SCHEMA: dict[str, Any] = {
    "properties": {
        "day": {"enum": ["Monday", "Friday", "Sunday"]},
        "urgent": {"type": "boolean"},
        "note": {"type": "string"},
        "visits": {"type": "integer"},
    }
}
# Friday is always urgent, Monday never is.
RECORDS = [{"day": "Monday", "urgent": False, "note": "one two", "visits": 1}] * 3 + [
    {"day": "Friday", "urgent": True, "note": "one two three four", "visits": 2}
]


def test_shares_dependence_and_lengths() -> None:
    report = describe(SCHEMA, RECORDS)
    assert report.records == 4
    day, urgent = report.enumerated
    assert day.shares == {"Monday": 0.75, "Friday": 0.25, "Sunday": 0.0}
    assert urgent.shares == {"True": 0.25, "False": 0.75}
    assert day.distance is None
    (pair,) = report.pairs
    assert pair.names == ("day", "urgent")
    assert pair.dependence == pytest.approx(0.375)  # the joint's 3/4 and 1/4, less 9/16 and 1/16
    (note,) = report.texts
    assert (note.name, note.mean, note.distinct) == ("note", 2.5, 0.5)


def test_distances_from_real_records() -> None:
    real = [{"day": "Monday", "urgent": True}, {"day": "Friday", "urgent": True}]
    report = describe(SCHEMA, RECORDS, real)
    assert [field.distance for field in report.enumerated] == [pytest.approx(0.25), pytest.approx(0.75)]
    assert report.pairs[0].distance == pytest.approx(0.75)
    same = describe(SCHEMA, RECORDS, RECORDS)
    assert [field.distance for field in same.enumerated] == [0.0, 0.0]


def test_variation_is_a_distance_between_0_and_1() -> None:
    assert variation({"a": 1.0}, {"b": 1.0}) == 1.0
    assert variation({"a": 0.5, "b": 0.5}, {"a": 1.0}) == 0.5
