"""One Ray cluster for the tests of the package, whose start takes seconds."""

from collections.abc import Iterator

import pytest
import ray

from tests.services.coordinator.actors import NAMESPACE


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
    yield
    ray.shutdown()
