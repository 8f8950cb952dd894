"""Starts Ray for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


@contextmanager
def ray_cluster(cpus: int, **options: Any) -> Iterator[str]:
    """Starts Ray on this machine, and stops it when the context exits. Yields its address.

    Args:
        options: further options of `ray.init`, such as `namespace`.
    """
    context = ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, **options)
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()
