"""Claim: the shards of a selection of tests are disjoint, and together they are the selection."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import CHUNK, shard

pytest_plugins = ["pytester"]

FILES = {"one": 11, "two": 1, "three": 6}


@dataclass(frozen=True)
class Selected:
    path: str
    number: int


ITEMS: list[Any] = [Selected(path, number) for path, count in FILES.items() for number in range(count)]


@pytest.mark.parametrize("shards", [1, 3, 12])
def test_every_test_is_in_one_shard(shards: int) -> None:
    kept = [shard(ITEMS, f"{index}/{shards}") for index in range(shards)]
    assert sorted((item for one in kept for item in one), key=ITEMS.index) == ITEMS
    assert shard(ITEMS, "0/3")[:CHUNK] == ITEMS[:CHUNK], "tests of a file stay together"


@pytest.mark.parametrize("wrong", ["3/3", "1", "a/3", "1/0", "-1/3", ""])
def test_a_shard_that_there_is_not_is_refused(wrong: str) -> None:
    with pytest.raises(pytest.UsageError, match="--shard must be I/K"):
        shard(ITEMS, wrong)


def test_a_repetition_of_failed_tests_repeats_those_of_the_shard(pytester: pytest.Pytester) -> None:
    """Only the files of failed tests are collected then, whose chunks have other numbers."""
    pytester.makeconftest("from tests.conftest import pytest_addoption, pytest_collection_modifyitems")
    tests = {"test_a": "def test_a(): pass", "test_b": "def test_b(): assert False", "test_c": "def test_c(): pass"}
    pytester.makepyfile(**tests)
    pytester.runpytest_inprocess("--shard", "1/3").assert_outcomes(failed=1)
    again = pytester.runpytest_inprocess("--last-failed", "--last-failed-no-failures", "none", "--shard", "1/3")
    again.assert_outcomes(failed=1)
