"""Claim: the shards of a selection of tests are disjoint, and together they are the selection."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import CHUNK, SHARED, shard

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


def test_each_file_that_uses_a_shared_fixture_is_named(request: pytest.FixtureRequest) -> None:
    """Of those that this run has selected. The fixture `service` has slow users that run elsewhere."""
    for item in request.session.items:
        for name, definitions in getattr(item, "_fixtureinfo").name2fixturedefs.items():  # noqa: B009
            files = SHARED.get((definitions[-1].baseid, name))
            if files is not None and not (name == "service" and item.get_closest_marker("slow")):
                assert item.nodeid.partition("::")[0] in files, f"add it to the files of {name} in tests/conftest.py"
