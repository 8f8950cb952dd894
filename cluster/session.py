"""A Ray cluster for the time of a command: the one that is named, or a local one of this process's own."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from services.local_ray import secure

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Connect to the cluster at `address` (or the environment's RAY_ADDRESS), else start one that ends with us."""
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address = address or os.environ.get("RAY_ADDRESS")
    secure(address)
    local = {} if address else {"include_dashboard": False}
    ray.init(address=address or "local", logging_level=logging.ERROR, log_to_driver=False, **local)
    try:
        yield
    finally:
        ray.shutdown()
