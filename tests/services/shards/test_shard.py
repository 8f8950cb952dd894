"""Claim: a shard answers before it prepares the adapters of the next calls, and bounds the rows that it keeps."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.actor import ActorHandle

from privmix.engine.engine import ZERO, ComingRow, EngineSettings
from privmix.privacy.protocols.pmixed import PMixed
from privmix.shards import shard as shards
from privmix.shards.sessions import Asked, StepKey
from privmix.shards.shard import LostStepError, Shard
from tests.ensembles import write_adapters
from tests.support.asking import KEY, asked
from tests.support.ray_cluster import ray_cluster
from tests.tiny import write_tiny_model

NAMES = ("part-000", "part-001")
COMING = (("a", NAMES[1]), ("a", ZERO))
ANSWER_S = 300.0


class PreparingShard(Shard):
    """Prepares adapters only when the test lets it."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._engine.prepare = self._prepared  # type: ignore[method-assign]

    def begin_test(self, allowed: Path, resident: bool) -> None:
        """Begins a test, which lets the shard prepare adapters by making the file `allowed`."""
        self._engine.resident = resident
        self._allowed = allowed
        self._seen: list[Sequence[ComingRow]] = []

    def _prepared(self, rows: Sequence[ComingRow]) -> None:
        deadline = time.monotonic() + 2 * ANSWER_S
        while not self._allowed.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the test did not allow the preparation")
            time.sleep(0.01)
        self._seen.append(rows)

    def seen(self) -> list[Sequence[ComingRow]]:
        """Returns the rows that were prepared for by now."""
        return self._seen


def rows(key: StepKey = KEY) -> Asked:
    """Asks for a token of a sequence whose next parts are the second one, and then none."""
    return asked(PMixed(2, 1.0, 0.4), dict(enumerate(NAMES)), {"a": (504, 253, 260)}, [(0,)], key, [((1,), ())])


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    folder = tmp_path_factory.mktemp("shard")
    model = write_tiny_model(folder / "model")
    adapters = write_adapters(folder / "parts", NAMES, model)
    with ray_cluster(2):
        yield EngineSettings(model, "transformers", "float32", 128, adapters=adapters)


@pytest.fixture(scope="module")
def shard(settings: EngineSettings) -> ActorHandle:
    """One shard for all tests, because its start takes seconds."""
    actor = ray.remote(concurrency_groups={"status": 1})(PreparingShard)
    return actor.options(num_cpus=0).remote(settings)


@pytest.mark.parametrize("last", ["next_token", "weigh", "add", "partial"])
def test_the_answer_leaves_before_the_preparation(shard: ActorHandle, tmp_path: Path, last: str) -> None:
    allowed, key = tmp_path / "allowed", StepKey("test", 1, 0)
    shard.begin_test.remote(allowed, resident=False)
    if last == "next_token":
        ray.get(shard.next_token.remote(rows(), public=True), timeout=ANSWER_S)
    elif last == "weigh":
        ray.get(shard.weigh.remote(rows(key)), timeout=ANSWER_S)
    elif last == "add":
        ray.get(shard.begin.remote(rows(key)), timeout=ANSWER_S)
        ray.get(shard.add.remote(key), timeout=ANSWER_S)
    else:
        _, public = shard.begin.remote(rows(StepKey("other", 1, 0)))
        ray.get(shard.keep.remote(rows(key)), timeout=ANSWER_S)
        ray.get(shard.partial.remote(key, public), timeout=ANSWER_S)
    allowed.touch()
    deadline = time.monotonic() + ANSWER_S
    while not (seen := ray.get(shard.seen.remote(), timeout=ANSWER_S)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert seen == [COMING]


def test_resident_adapters_are_not_prepared(shard: ActorHandle, tmp_path: Path) -> None:
    shard.begin_test.remote(tmp_path / "never", resident=True)
    for _ in range(2):
        ray.get(shard.weigh.remote(rows()), timeout=ANSWER_S)
    assert ray.get(shard.seen.remote(), timeout=ANSWER_S) == []


@pytest.mark.parametrize(("gpu_gib", "room_gib"), [(None, 4.0), (24, 1.2), (140, 4.0)])
def test_what_is_kept_fits_into_what_the_engine_leaves_free(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch, gpu_gib: int | None, room_gib: float
) -> None:
    if gpu_gib is not None:
        memory = SimpleNamespace(total_memory=gpu_gib * 2**30)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: memory)
    room = min(shards.KEPT_BYTES, shards.KEPT_SHARE * shards.left_free(settings.gpu_memory_utilization))
    assert room == pytest.approx(room_gib * 2**30)


def test_the_oldest_kept_rows_make_room_for_new_ones(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their coordinator repeats its step. Rows of one step never drop each other."""
    shard = Shard(settings)
    _, public = shard.begin(rows(StepKey("public", 1, 0)))
    size = 2 * public.nbytes
    monkeypatch.setattr(shards, "KEPT_BYTES", 2 * size)
    first, second, third = StepKey("first", 1, 0), StepKey("second", 7, 0), StepKey("second", 7, 1)
    for key in (first, second, third):
        shard.keep(rows(key))
    with pytest.raises(LostStepError):
        shard.partial(first, public)
    monkeypatch.setattr(shards, "KEPT_BYTES", 0)
    fourth = StepKey("second", 7, 2)
    shard.keep(rows(fourth))
    for key in (second, third, fourth):
        assert shard.partial(key, public)[1].shape == public.shape
