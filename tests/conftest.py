"""Fixtures that several suites share, created once per run."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

import privmix
from privmix.training.public_model import resolve
from tests import postgresql as postgresql_server
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, running

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Threads that wait for work in a loop take the cores of the tests, services and engines beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves actors beside tests in the same session

PARTS = 4

SERVED_CONTEXT = 2048
"""The number of tokens of a prompt and its answer in the fixture `service`."""

SHARED: dict[tuple[str, str], tuple[str, ...]] = {
    ("tests/services/training", "one_ray"): tuple(
        f"tests/services/training/test_{name}.py" for name in ("command", "dp_sgd", "manifest", "private_base", "train")
    ),
    ("tests", "service"): tuple(f"tests/services/gateway/test_{name}.py" for name in ("http1", "service", "structure")),
    ("tests/services/coordinator", "cluster"): tuple(
        f"tests/services/coordinator/test_{name}.py" for name in ("protocols", "steps", "structure")
    ),
}
"""The files of each fixture that takes long to set up: its folder and name. One process runs all of them, so that it is
set up once. Of the users of `service`, those that are in the default run."""


class SharedFixtures(LoadFileScheduling):  # type: ignore[misc]
    """Runs each file in one process, and all files of a shared fixture in one, before the others.

    They take longest: what begins last has nothing beside it at its end.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((files[0] for files in SHARED.values() if file in files), file)

    def _assign_work_unit(self, node: Any) -> None:
        longest = (files[0] for files in SHARED.values() if files[0] in self.workqueue)
        if (scope := next(longest, None)) is not None:
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


CHUNK = 4
"""How many tests of a file are in one shard, one after another, because they share what is started for them."""


def pytest_configure() -> None:
    """Refuses to test the packages of another checkout, whose environment this one may share."""
    root, found = Path(__file__).parents[1], Path(privmix.__file__).resolve()
    if not found.is_relative_to(root):
        raise pytest.UsageError(
            f"privmix is imported from {found}; set PYTHONPATH={root}/services:{root}/cluster:{root}"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/K", help="run shard I, from 0, of K of the selected tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Keeps a shard of the tests that other options have selected; a repetition of failed ones keeps all of them."""
    yield
    wanted: str | None = config.getoption("shard")
    if wanted is None or config.getoption("lf"):
        return
    kept = shard(items, wanted)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def shard(items: Sequence[pytest.Item], wanted: str) -> list[pytest.Item]:
    """Returns the tests of a shard: of all chunks of all files, every K-th.

    Raises:
        UsageError: the shard is not I/K with 0 <= I < K.
    """
    index, slash, count = wanted.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise pytest.UsageError(f"--shard must be I/K with I from 0 to K - 1, got {wanted}")
    chunks = []
    for _, group in groupby(items, key=lambda item: item.path):
        of_file = list(group)
        chunks += [of_file[first : first + CHUNK] for first in range(0, len(of_file), CHUNK)]
    return [item for chunk in chunks[int(index) :: int(count)] for item in chunk]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return SharedFixtures(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Runs asynchronous tests with asyncio alone."""
    return "asyncio"


@pytest.fixture(scope="session")
def public_model() -> Path:
    return resolve()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, which no test changes."""
    from tests.tiny import write_tiny_model  # imports transformers, for which most processes need not wait

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ensemble(tmp_path_factory.mktemp("ensemble"), PARTS)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """The real service: vLLM on the CPU, Ray actors, Serve, a SQLite ledger. Destructive tests start their own.

    It has a tiny model, whose tokens are nonsense. The context is long, so that no answer ends soon by itself.
    """
    from tests.tiny import write_served_model  # imports transformers, for which most processes need not wait

    folder = tmp_path_factory.mktemp("service")
    model = write_served_model(folder / "model", SERVED_CONTEXT)
    config = configure(
        folder,
        write_ensemble(folder / "ensemble", PARTS, model=model),
        engine={"context_length": SERVED_CONTEXT},
        http={"max_tokens": SERVED_CONTEXT - 32},
        # A second thread of the shard waits awake for the first, and takes the processor of the tests beside it.
        shards={"threads": 1},
    )
    with running(config) as started:
        yield started


@pytest.fixture(scope="session")
def postgresql() -> Iterator[postgresql_server.Server]:
    """One server for all tests that need one. Each test creates its own databases."""
    with postgresql_server.running() as server:
        yield server
