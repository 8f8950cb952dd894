"""Claim: the shards of a selection of tests are disjoint, and together they are the selection; of two processes, one
runs all tests that share what takes long to start."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import CHUNK, SHARED, SharedFixtures, shard

pytest_plugins = ["pytester"]

FILES = {"one": 11, "two": 1, "three": 6}


@dataclass(frozen=True)
class Selected:
    path: str
    number: int


class Process:
    """Keeps the numbers of the tests that it is told to run."""

    def __init__(self) -> None:
        self.told: list[list[int]] = []

    def send_runtest_some(self, tests: list[int]) -> None:
        self.told.append(tests)


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


def test_files_that_share_a_fixture_run_first_and_in_one_process() -> None:
    shared = next(iter(SHARED.values()))
    tests = [f"{file}::test_{number}" for file in ("tests/test_names.py", *shared) for number in range(2)]
    process, scheduler = Process(), object.__new__(SharedFixtures)
    scheduler.workqueue, scheduler.assigned_work = OrderedDict(), {}
    scheduler.registered_collections = {process: tests}
    for test in tests:
        scheduler.workqueue.setdefault(scheduler._split_scope(test), {})[test] = False
    while scheduler.workqueue:
        scheduler._assign_work_unit(process)
    assert process.told == [list(range(2, len(tests))), [0, 1]]


def test_each_file_that_uses_a_shared_fixture_is_named(request: pytest.FixtureRequest) -> None:
    """Of those that this run has selected. The fixture `service` has slow users that run elsewhere."""
    for item in request.session.items:
        for name, definitions in getattr(item, "_fixtureinfo").name2fixturedefs.items():  # noqa: B009
            files = SHARED.get((definitions[-1].baseid, name))
            if files is not None and not (name == "service" and item.get_closest_marker("slow")):
                assert item.nodeid.partition("::")[0] in files, f"add it to the files of {name} in tests/conftest.py"
