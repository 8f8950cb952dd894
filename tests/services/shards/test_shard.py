"""Claim: a shard bounds the rows that it keeps."""

from types import SimpleNamespace
from typing import Any

import pytest

from privmix.engine.engine import EngineSettings
from privmix.privacy.protocols.pmixed import PMixed
from privmix.shards import shard as shards
from privmix.shards.sessions import Asked, StepKey
from privmix.shards.shard import LostStepError, Shard
from tests.ensembles import write_adapters
from tests.support.asking import KEY, asked
from tests.tiny import write_tiny_model

NAMES = ("part-000", "part-001")


def rows(key: StepKey = KEY) -> Asked:
    return asked(PMixed(2, 1.0, 0.4), dict(enumerate(NAMES)), {"a": (504, 253, 260)}, [(0,)], key)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("shard")
    model = write_tiny_model(folder / "model")
    adapters = write_adapters(folder / "parts", NAMES, model)
    return EngineSettings(model, "transformers", "float32", 128, adapters=adapters)


@pytest.mark.parametrize(
    ("gpu_gib", "reserved", "room_gib"), [(None, 1.0, 4.0), (24, 1.0, 1.2), (24, 0.5, 0.6), (140, 2.0, 4.0)]
)
def test_what_is_kept_fits_into_what_the_engines_of_a_gpu_leave_free(
    monkeypatch: pytest.MonkeyPatch, gpu_gib: int | None, reserved: float, room_gib: float
) -> None:
    if gpu_gib is not None:
        here = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0, "GPU": reserved})
        monkeypatch.setattr("ray.get_runtime_context", lambda: here)
        memory = SimpleNamespace(total_memory=gpu_gib * 2**30)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: memory)
    room = min(shards.KEPT_BYTES, shards.KEPT_SHARE * shards.left_free(0.9 * min(1.0, reserved)))
    assert room == pytest.approx(room_gib * 2**30)


def test_the_oldest_kept_rows_make_room_for_new_ones(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their coordinator repeats its step. Rows of one step never drop each other."""
    shard = Shard(settings)
    monkeypatch.setattr("ray.put", lambda value: value)
    shard.begin(rows(key := StepKey("public", 1, 0)))
    public: Any = shard._take(key).public
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
        assert shard.partial(key, public)[0].shape == public.shape


def test_weights_of_a_step_that_was_given_up_are_not_held(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller has begun another one while partials were on their way."""
    shard = Shard(settings)
    monkeypatch.setattr("ray.put", lambda value: value)
    newer = StepKey("one", 2, 0)
    monkeypatch.setattr(shards, "_answers", lambda *_: shard.begin(rows(newer)) or [])
    shard.begin(rows(given_up := StepKey("one", 1, 0)))
    with pytest.raises(LostStepError):
        shard.add(given_up, (), 1.0)
    assert list(shard._kept) == [newer]
