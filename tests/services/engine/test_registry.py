"""Claim: an unknown engine is refused with the names of the known ones."""

import pytest
from pydantic import ValidationError

from privmix_cluster.configuration import EngineSection


def test_an_unknown_engine_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValidationError, match="must be one of vllm, transformers, not 'tgi'"):
        EngineSection(kind="tgi")
