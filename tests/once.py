"""Shares what is expensive to create among the worker processes of one test run."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

T = TypeVar("T")


def once(factory: pytest.TempPathFactory, name: str, create: Callable[[Path], T]) -> T:
    """Returns the value that `create` made in a directory of its own, in this process or in another one of the run."""
    run = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    directory, stored = run / f"once-{name}", run / f"once-{name}.pickle"
    with FileLock(run / f"once-{name}.lock"):
        if not stored.exists():
            directory.mkdir()
            stored.write_bytes(pickle.dumps(create(directory)))
        value: T = pickle.loads(stored.read_bytes())
    return value
