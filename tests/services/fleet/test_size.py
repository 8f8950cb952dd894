"""Claim: the size that an operator chose is read again until the configuration names another one."""

from dataclasses import replace
from pathlib import Path

import pytest

from privmix.fleet.shard_map import Size
from privmix.fleet.size import StoredSize
from privmix.foundation.errors import KeysUnavailable


@pytest.fixture
def size(tmp_path: Path) -> StoredSize:
    return StoredSize(str(tmp_path / "keys.db"), "privmix", configured=Size(2))


def test_the_configured_number_serves_until_an_operator_chooses(size: StoredSize) -> None:
    assert size.read() == Size(2)
    size.write(Size(5, 2))
    size.write(Size(3, 4))
    assert size.read() == Size(3, 4)


def test_a_new_number_in_the_configuration_replaces_the_choice(size: StoredSize) -> None:
    size.write(Size(5, 2))
    assert replace(size, configured=Size(2, 2)).read() == Size(2, 2)
    assert size.read() == Size(5, 2), "until an operator chooses under the new configuration"
    replace(size, configured=Size(4)).write(Size(6))
    assert size.read() == Size(2)


def test_each_ensemble_has_its_own_number(size: StoredSize) -> None:
    size.write(Size(5, 2))
    assert replace(size, namespace="privmix.notes").read() == Size(2)


def test_a_database_that_is_gone_is_an_error(size: StoredSize) -> None:
    with pytest.raises(KeysUnavailable, match="directory"):
        replace(size, database="/nowhere/keys.db").write(Size(3))
