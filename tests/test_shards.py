"""Claim: the shards of a selection of tests are disjoint, and together they are the selection."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import CHUNK, shard

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
