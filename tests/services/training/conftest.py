"""Fixtures of the training tests: the real public model, one Ray, and a small ensemble with an empty part."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from privmix.training import public_model
from tests.once import once
from tests.support.ray_cluster import ray_cluster
from tests.support.training import Ensemble, trained


@pytest.fixture(scope="session")
def base() -> Path:
    return public_model.resolve()


# Scope package, because other packages start their own Ray.
@pytest.fixture(scope="package")
def one_ray() -> Iterator[str]:
    """The address of the only Ray cluster that these tests start."""
    with ray_cluster(1) as address:  # one worker, which loads a model once for all adapters
        yield address


@pytest.fixture(scope="package")
def ensemble(base: Path, one_ray: str, tmp_path_factory: pytest.TempPathFactory) -> Ensemble:
    return once(tmp_path_factory, "ensemble", trained)
