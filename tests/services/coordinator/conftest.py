"""One Ray cluster for the tests of the package, whose start takes seconds."""

from collections.abc import Iterator

import pytest

from tests.services.coordinator.actors import NAMESPACE
from tests.support.ray_cluster import ray_cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    with ray_cluster(4, namespace=NAMESPACE):
        yield
