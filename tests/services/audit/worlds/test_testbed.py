"""Claim: what was trained for one size, or for one attack, is not taken for what another asks for."""

from pathlib import Path

import pytest

from services.audit.worlds import shadow_ensembles, testbed
from services.audit.worlds.testbed import begun_with
from services.errors import InputError


def test_a_directory_goes_on_with_its_own_sizes_alone(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "audit"
    begun_with(directory, testbed.Size(users=3))
    begun_with(directory, testbed.Size(users=3))
    with pytest.raises(InputError, match=r"users: .* was begun with 3, not 4"):
        begun_with(directory, testbed.Size(users=4))
    with pytest.raises(InputError, match="for another attack"):
        begun_with(directory, shadow_ensembles.Size(users=3))
