"""Claim: an audit refuses a directory that was trained with another size or for another attack."""

from pathlib import Path

import pytest

from privmix.foundation.errors import InputError
from privmix.laboratory.audit.sizes import AdjacentSize, PlantedSize
from privmix.laboratory.audit.testbed import claim_directory


def test_a_directory_accepts_only_its_own_size(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "audit"
    claim_directory(directory, PlantedSize(users=3))
    claim_directory(directory, PlantedSize(users=3))
    with pytest.raises(InputError, match=r"was made with .*'users': 3.*, not .*'users': 4"):
        claim_directory(directory, PlantedSize(users=4))
    with pytest.raises(InputError, match="was made with"):
        claim_directory(directory, AdjacentSize(parts=3))
