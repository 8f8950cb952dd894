"""Claim: a coordinator tells of a step that hangs, and of steps that fail while somebody waits; errors end answers."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator import coordinator as coordinator_module
from privmix.coordinator.coordinator import Coordinator
from privmix.coordinator.messages import Generation
from privmix.coordinator.step import Step, StepResult
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.pmixed import PMixed
from privmix.training import public_model
from tests.support.offline import offline

TERMS = PrivacyBudget(ensemble="e", epsilon=1e3, delta=1e-5, order=4.0, adjacency="user")


def coordinator_at(place: Path) -> Coordinator:
    return offline(Coordinator, PMixed(2, 1.0, 0.4), TERMS, place, public_model.resolve())[0]


async def no_groups() -> tuple[()]:
    return ()


def test_a_step_that_hangs_and_steps_that_fail_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        coordinator = coordinator_at(tmp_path / "ledger.db")
        monkeypatch.setattr(coordinator._ensemble, "status", no_groups, raising=False)
        limit = coordinator._settings.step_timeout_s
        monkeypatch.setattr(coordinator, "_began", time.monotonic() - limit / 2)
        await coordinator.health()
        monkeypatch.setattr(coordinator, "_began", time.monotonic() - limit - 1)
        with pytest.raises(CoordinatorUnavailable, match="a step has taken"):
            await coordinator.health()
        monkeypatch.setattr(coordinator, "_began", None)
        monkeypatch.setattr(coordinator, "_failing_since", time.monotonic())
        await coordinator.health()  # nobody waits
        await coordinator.submit("channel", [Generation("a", (504,), SamplingOptions(), 1)])
        with pytest.raises(CoordinatorUnavailable, match="steps have failed"):
            await coordinator.health()
        await coordinator.close()

    asyncio.run(run())


def test_an_error_that_stays_is_repeated_once_for_each_answer_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    async def ask(step: Step) -> StepResult:
        asked.append(step.sequences)
        if len(asked) > 3:
            raise asyncio.CancelledError  # which ends the steps
        raise RuntimeError("out of memory")

    async def run() -> int:
        coordinator = coordinator_at(tmp_path / "ledger.db")
        monkeypatch.setattr(coordinator._ensemble, "ask", ask)
        await coordinator.submit("channel", [Generation(id_, (504,), SamplingOptions(), 1) for id_ in "ab"])
        for _ in range(200):
            await asyncio.sleep(0)
        return await coordinator.load()

    assert asyncio.run(run()) == 0
    assert asked == [("a", "b"), ("a",), ("b",)]


def test_a_shard_that_hangs_while_another_error_is_looked_for_ends_answers_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer alone waited for the shard as long as a step may take, again and again."""

    async def ask(step: Step) -> StepResult:
        raise RuntimeError("out of memory") if len(step.sequences) > 1 else TimeoutError

    async def run() -> None:
        coordinator = coordinator_at(tmp_path / "ledger.db")
        coordinator._settings = replace(coordinator._settings, recovery_s=0.0)
        monkeypatch.setattr(coordinator._ensemble, "ask", ask)
        monkeypatch.setattr(coordinator_module, "REPEAT_S", 0.0)
        await coordinator.submit("channel", [Generation(id_, (504,), SamplingOptions(), 1) for id_ in "ab"])
        for _ in range(200):
            await asyncio.sleep(0)
        assert not await coordinator.load()
        ends = await anext(coordinator.events("channel"))
        assert [(delta.finish_reason, delta.retry_after) for delta in ends] == [("error", 30.0)] * 2

    asyncio.run(run())


@pytest.mark.parametrize("new", ["shard", "map"])
def test_a_new_shard_reads_no_more_contexts_in_a_step_than_at_first(
    new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    updating: list[asyncio.Task[int]] = []

    async def run() -> None:
        coordinator = coordinator_at(tmp_path / "ledger.db")
        answers = coordinator._ensemble.ask

        async def ask(step: Step) -> StepResult:
            asked.append(step.sequences)
            if len(asked) == 3:  # both contexts are read
                if new == "shard":
                    raise TimeoutError
                shard_map = replace(coordinator._shard_map, version=2)
                updating.append(asyncio.create_task(coordinator.update_shards(shard_map)))
            return await answers(step)

        monkeypatch.setattr(coordinator._ensemble, "ask", ask)
        monkeypatch.setattr(coordinator_module, "REPEAT_S", 0.0)
        long = (504,) * (coordinator_module.PREFILL_TOKENS // 2 + 1)
        await coordinator.submit("channel", [Generation(id_, long, SamplingOptions(), 4) for id_ in "ab"])
        while await coordinator.load():
            await asyncio.sleep(0)

    asyncio.run(run())
    assert asked[:4] == [("a",), ("a", "b"), ("a", "b"), ("a",)]


def test_what_a_step_tells_of_a_client_that_leaves_meanwhile_is_forgotten_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: set[str] = set()

    async def run() -> None:
        coordinator = coordinator_at(tmp_path / "ledger.db")
        answers = coordinator._ensemble.ask

        async def ask(step: Step) -> StepResult:
            if "b" in step.sequences:
                await coordinator.cancel(["b"])
            told.update(step.sequences)  # by a copy that is asked last
            return await answers(step)

        monkeypatch.setattr(coordinator._ensemble, "ask", ask)
        monkeypatch.setattr(coordinator._ensemble, "drop_caches", told.difference_update)
        await coordinator.submit("channel", [Generation(id_, (504,), SamplingOptions(), 1) for id_ in "ab"])
        while await coordinator.load():
            await asyncio.sleep(0)

    asyncio.run(run())
    assert not told
