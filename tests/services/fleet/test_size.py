"""Claim: the number of shards that an operator chose is read again until the configuration names another number."""

from dataclasses import replace
from pathlib import Path

import pytest

from privmix.fleet.size import FleetSize
from privmix.foundation.errors import KeysUnavailable


@pytest.fixture
def size(tmp_path: Path) -> FleetSize:
    return FleetSize(str(tmp_path / "keys.db"), "privmix", configured=2)


def test_the_configured_number_serves_until_an_operator_chooses(size: FleetSize) -> None:
    assert size.read() == 2
    size.write(5)
    size.write(3)
    assert size.read() == 3


def test_a_new_number_in_the_configuration_replaces_the_choice(size: FleetSize) -> None:
    size.write(5)
    assert replace(size, configured=4).read() == 4
    assert size.read() == 5, "until an operator chooses under the new configuration"
    replace(size, configured=4).write(6)
    assert size.read() == 2


def test_each_ensemble_has_its_own_number(size: FleetSize) -> None:
    size.write(5)
    assert replace(size, namespace="privmix.notes").read() == 2


def test_a_database_that_is_gone_is_an_error(size: FleetSize) -> None:
    with pytest.raises(KeysUnavailable, match="directory"):
        replace(size, database="/nowhere/keys.db").write(3)
