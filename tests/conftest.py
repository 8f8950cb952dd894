"""Fixtures that several suites share, created once per run."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from services.training.public_model import resolve
from tests import postgresql as postgresql_server
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, own_ensemble, running

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves actors beside tests in the same session

PARTS = 4

USERS_OF_SERVICE = ("tests/services/gateway/test_service.py", "tests/services/gateway/test_structure.py")
"""The files whose default tests use the fixture `service`. One process runs them, so that it is started once."""


class SharedService(LoadFileScheduling):  # type: ignore[misc]
    """Runs each file in one process, and all of `USERS_OF_SERVICE` in one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return USERS_OF_SERVICE[0] if file in USERS_OF_SERVICE else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return SharedService(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def public_model() -> Path:
    return resolve()


@pytest.fixture(scope="session")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ensemble(tmp_path_factory.mktemp("ensemble"), PARTS)


@pytest.fixture(scope="session")
def service(ensemble: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """The real service: vLLM on the CPU, Ray actors, Serve, a SQLite ledger. Destructive tests start their own."""
    folder = tmp_path_factory.mktemp("service")
    with running(configure(folder, own_ensemble(ensemble, folder))) as started:
        yield started


@pytest.fixture(scope="session")
def postgresql() -> Iterator[postgresql_server.Server]:
    """One server for all tests that need one. Each test creates its own databases."""
    with postgresql_server.running() as server:
        yield server
