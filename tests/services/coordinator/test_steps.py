"""Claim: a step has a constant shape, a failed step costs nothing, and it ends only the sequences that caused it."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle

from privmix.budget.reading import read
from privmix.coordinator.arithmetic import Arithmetic
from privmix.coordinator.coordinator import MAX_LOST, Coordinator
from privmix.coordinator.messages import Delta, Generation
from privmix.engine.engine import EngineSettings
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.pmixed import PMixed
from privmix.shards.sessions import Asked, StepKey
from privmix.shards.shard import CONCURRENCY, LostStepError, Shard
from tests.ensembles import write_adapters
from tests.services.coordinator.actors import end
from tests.support.asking import asked
from tests.support.steps import Operation, RecordingShard, coordinating, reasons, shard_map, until_ended
from tests.tiny import write_tiny_model

PARTS = 4
PROMPTS = ((504, 253, 260), (504, 253), (27, 10, 99, 504, 253))
TOKENS = 4


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineSettings, ...]:
    """Settings of two engines with two parts each."""
    folder = tmp_path_factory.mktemp("steps")
    model = write_tiny_model(folder / "model")
    names = [f"part-{index:03d}" for index in range(PARTS)]
    adapters = write_adapters(folder / "parts", names, model)
    return tuple(
        EngineSettings(model, "transformers", "float32", 128, adapters={name: adapters[name] for name in theirs})
        for theirs in (names[:2], names[2:])
    )


@pytest.fixture(scope="module")
def shards(cluster: None, engines: tuple[EngineSettings, ...]) -> Iterator[list[ActorHandle]]:
    recording = ray.remote(concurrency_groups=CONCURRENCY, max_restarts=-1)(RecordingShard)
    started = [
        recording.options(name=f"shard-{index}", num_cpus=0).remote(engine) for index, engine in enumerate(engines)
    ]
    ray.get([shard.status.remote() for shard in started])
    yield started
    for shard in started:
        end(shard)


async def generate(coordinator: Coordinator, prompts: Mapping[str, tuple[int, ...]], tokens: int) -> list[Delta]:
    """Returns all deltas of one generation per prompt."""
    options = SamplingOptions(top_k=200)
    await coordinator.submit("channel", [Generation(id_, prompt, options, tokens) for id_, prompt in prompts.items()])
    return await until_ended(coordinator, len(prompts))


@pytest.mark.parametrize(
    ("shards_of_all", "draw"), [(1, ()), (1, (0,)), (1, (1,)), (2, ()), (2, (0,)), (2, (PARTS - 1,))]
)
def test_totals_and_tokens_leave_the_shards_whatever_is_drawn(
    engines: tuple[EngineSettings, ...],
    shards: list[ActorHandle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards_of_all: int,
    draw: tuple[int, ...],
) -> None:
    monkeypatch.setattr(PMixed, "draw", lambda self: draw)

    def compute(_: Arithmetic) -> Any:
        raise AssertionError("the coordinator computes nothing")

    monkeypatch.setattr(Arithmetic, "_pool", property(compute))

    async def run() -> list[Delta]:
        serving = shard_map(PMixed(2 * shards_of_all, 0.5, 0.4), ("shard-0", "shard-1")[:shards_of_all])
        async with coordinating(engines, tmp_path / "ledger.db", serving) as coordinator:
            deltas = await generate(coordinator, {"a": PROMPTS[0], "b": PROMPTS[1]}, TOKENS)
            measures = await coordinator.measures()
        assert measures["row_bytes"] == TOKENS * 2 * 8, "a total for each token"
        assert measures["rows"] == TOKENS * 2 * shards_of_all * (1 + 1)
        return deltas

    assert set(reasons(asyncio.run(run())).values()) == {"length"}
    assert sum(read(tmp_path / "ledger.db").charged.values()) == TOKENS * 2


@pytest.mark.slow
def test_the_operations_of_a_shard_do_not_depend_on_the_drawn_parts(
    engines: tuple[EngineSettings, ...], shards: list[ActorHandle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = PMixed(PARTS, 0.5, 0.4)
    prompts = {f"sequence-{index}": prompt for index, prompt in enumerate(PROMPTS)}

    async def operations(draw: tuple[int, ...]) -> list[list[Operation]]:
        monkeypatch.setattr(PMixed, "draw", lambda self: draw)
        async with coordinating(engines, tmp_path / f"{draw}" / "ledger.db", shard_map(protocol)) as coordinator:
            ray.get([shard.operations.remote() for shard in shards])
            deltas = await generate(coordinator, prompts, TOKENS)
        assert set(reasons(deltas).values()) == {"length"}
        return ray.get([shard.operations.remote() for shard in shards])

    async def run() -> None:
        await operations((1,))  # the first step of a shape makes memory for it
        nothing, first, last = [await operations(draw) for draw in ((), (0,), (PARTS - 1,))]
        assert nothing == first == last
        for recorded in first:
            steps = [operation for operation in recorded if operation[0] == "rows"]
            assert len(steps) == TOKENS, "every shard advances every sequence"
            assert len(recorded) > 10 * TOKENS, "and reduces its rows"
            for step, (_, requested, shape, _, _) in enumerate(steps):
                expected = [(name, len(prompt) + step, 1 + 1) for name, prompt in prompts.items()]
                assert list(requested) == expected, "one public row and one part row for each sequence"
                assert shape[0] == 2 * len(prompts)

    for draw in ((1,), (), (0,), (PARTS - 1,)):
        (tmp_path / f"{draw}").mkdir()
    asyncio.run(run())


def test_every_shard_reads_a_sequence_under_the_salt_of_its_client(
    engines: tuple[EngineSettings, ...], shards: list[ActorHandle], tmp_path: Path
) -> None:
    async def run() -> None:
        async with coordinating(engines, tmp_path / "ledger.db", shard_map(PMixed(PARTS, 0.5, 0.4))) as coordinator:
            ray.get([shard.salts.remote() for shard in shards])
            options = SamplingOptions()
            generations = [
                Generation("of-one", PROMPTS[0], options, 2, cache_salt="one"),
                Generation("of-another", PROMPTS[0], options, 2, cache_salt="another"),
                Generation("continued", PROMPTS[0], options, 2, released=(9,), cache_salt="one"),
            ]
            await coordinator.submit("channel", generations)
            await until_ended(coordinator, len(generations))
        for salts in ray.get([shard.salts.remote() for shard in shards]):
            assert salts == {("of-one", "one"), ("of-another", "another"), ("continued", "one")}

    asyncio.run(run())


def test_a_thousand_requests_to_dead_shards_cost_nothing(
    engines: tuple[EngineSettings, ...], shards: list[ActorHandle], tmp_path: Path
) -> None:
    """An idle coordinator returns its lease, too."""
    prompts = {f"request-{number}": PROMPTS[0] for number in range(1000)}
    serving = shard_map(PMixed(PARTS, 0.5, 0.4), ("shard-0", "dead"))

    async def run() -> list[Delta]:
        settings = {"max_waiting": 1000, "recovery_s": 1.0}
        async with coordinating(engines, tmp_path / "ledger.db", serving, **settings) as coordinator:
            deltas = await generate(coordinator, prompts, TOKENS)
            # On a busy machine the living shard may still compute. Then the error names that shard.
            with pytest.raises(CoordinatorUnavailable, match="a part group is not served"):
                await coordinator.health()
            return deltas

    deltas = asyncio.run(run())
    assert set(reasons(deltas).values()) == {"error"}
    assert not sum(delta.tokens for delta in deltas)
    assert {delta.retry_after for delta in deltas} == {30.0}
    assert sum(read(tmp_path / "ledger.db").charged.values()) == 0


def test_a_context_that_the_engine_refuses_ends_only_its_sequence(
    engines: tuple[EngineSettings, ...], shards: list[ActorHandle], tmp_path: Path
) -> None:
    prompts = {"good": PROMPTS[0], "bad": (10**9,), "another": PROMPTS[1]}

    async def run() -> list[Delta]:
        serving = shard_map(PMixed(PARTS, 0.5, 0.4))
        async with coordinating(engines, tmp_path / "ledger.db", serving) as coordinator:
            return await generate(coordinator, prompts, TOKENS)

    deltas = asyncio.run(run())
    assert reasons(deltas) == {"good": "length", "bad": "error", "another": "length"}
    assert {delta.retry_after for delta in deltas} == {None}, "a retry cannot succeed"
    assert sum(read(tmp_path / "ledger.db").charged.values()) == 2 * TOKENS


def test_an_answer_continues_after_its_released_tokens(
    engines: tuple[EngineSettings, ...], shards: list[ActorHandle], tmp_path: Path
) -> None:
    """A gateway resubmits a generation of a lost coordinator; only the remaining tokens are generated and charged."""
    released = (260, 253)

    async def run() -> list[Delta]:
        ray.get([shard.operations.remote() for shard in shards])
        async with coordinating(engines, tmp_path / "ledger.db", shard_map(PMixed(PARTS, 0.5, 0.4))) as coordinator:
            generation = Generation("g", PROMPTS[0], SamplingOptions(top_k=200), TOKENS, released=released)
            await coordinator.submit("channel", [generation])
            return await until_ended(coordinator, 1)

    deltas = asyncio.run(run())
    assert reasons(deltas) == {"g": "length"}
    assert sum(delta.tokens for delta in deltas) == TOKENS - len(released)
    for recorded in ray.get([shard.operations.remote() for shard in shards]):
        contexts = [operation[1][0][1] for operation in recorded if operation[0] == "rows"]
        assert contexts == [len(PROMPTS[0]) + count for count in range(len(released), TOKENS)]
    assert sum(read(tmp_path / "ledger.db").charged.values()) == TOKENS - len(released)


def deltas_beside_losses(
    engines: tuple[EngineSettings, ...],
    shard: ActorHandle,
    folder: Path,
    prompts: dict[str, tuple[int, ...]],
    steps: int,
) -> list[Delta]:
    """Returns the deltas of answers from one shard, which computes this many steps and loses them."""

    async def run() -> list[Delta]:
        serving = shard_map(PMixed(2, 1.0, 0.4), ("shard-0",))
        async with coordinating(engines, folder / "ledger.db", serving) as coordinator:
            ray.get(shard.lose.remote(steps))
            deltas = await generate(coordinator, prompts, TOKENS)
            ray.get(shard.lose.remote(0))  # other tests use the shard, too
            return deltas

    return asyncio.run(run())


def test_a_token_whose_weights_are_lost_stays_charged(
    engines: tuple[EngineSettings, ...], shards: list[ActorHandle], tmp_path: Path
) -> None:
    """Its point was drawn, so it was sampled, although nobody saw it. Two attempts fail after their charge."""
    deltas = deltas_beside_losses(engines, shards[0], tmp_path, {"a": PROMPTS[0]}, 2)
    assert set(reasons(deltas).values()) == {"length"}
    assert sum(delta.charged for delta in deltas) == TOKENS + 2
    assert sum(read(tmp_path / "ledger.db").charged.values()) == TOKENS + 2
    assert ray.get(shards[0].status.remote()).failure is None, "the shard is sound"


def test_a_shard_that_loses_every_token_costs_few(
    engines: tuple[EngineSettings, ...], shards: list[ActorHandle], tmp_path: Path
) -> None:
    deltas = deltas_beside_losses(engines, shards[0], tmp_path, {"a": PROMPTS[0], "b": PROMPTS[1]}, 1000)
    assert reasons(deltas) == {"a": "error", "b": "error"}
    assert all(delta.retry_after for delta in deltas if delta.finish_reason == "error")
    assert [delta.charged for delta in deltas] == [MAX_LOST + 1] * 2
    assert sum(read(tmp_path / "ledger.db").charged.values()) == 2 * (MAX_LOST + 1)


def test_a_shard_holds_what_each_callers_last_step_needs(engines: tuple[EngineSettings, ...]) -> None:
    shard = Shard(engines[0])
    protocol, models = PMixed(PARTS, 1.0, 0.4), {0: "part-000", 1: "part-001"}

    def rows(key: StepKey) -> Asked:
        return asked(protocol, models, {"a": PROMPTS[0]}, [(0,)], key)

    one, other = (StepKey(caller, 1, 0) for caller in ("one", "other"))
    for key in (one, other, StepKey("one", 2, 0), StepKey("one", 2, 1)):
        shard.keep(rows(key))
    totals, _ = shard.weigh(rows(StepKey("alone", 1, 0)))
    first = StepKey("first", 1, 0)
    shard.begin(rows(first))
    public: Any = ray.get(shard._kept[first].public)
    shard.begin(asked(protocol, models, {"b": PROMPTS[1]}, [(1,)], StepKey("second", 1, 0)))
    assert shard.add(first, (), 1.0)[0].tolist() == totals.tolist(), "another caller's step changes nothing"
    for key in (other, StepKey("one", 2, 0), StepKey("one", 2, 1)):
        sums, _ = shard.partial(key, public)
        assert sums.shape == public.shape
    for key in (one, other):
        with pytest.raises(LostStepError):
            shard.partial(key, public)
    assert shard.status().trouble(60.0) is None


class FailingShard(Shard):
    """Its engine fails."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._engine.logits = self._fail  # type: ignore[method-assign, assignment]

    def _fail(self, _: object) -> Any:
        raise RuntimeError("out of memory")


@pytest.mark.slow
def test_a_shard_reports_a_failed_engine(engines: tuple[EngineSettings, ...], shards: list[ActorHandle]) -> None:
    failing = ray.remote(concurrency_groups=CONCURRENCY)(FailingShard)
    broken = failing.options(name="broken", num_cpus=0).remote(engines[0])
    with pytest.raises(ray.exceptions.RayTaskError):
        ray.get(broken.weigh.remote(asked(PMixed(2, 1.0, 0.4), {0: "part-000"}, {"a": PROMPTS[0]}, [(0,)])))
    assert "failed with RuntimeError" in ray.get(broken.status.remote()).trouble(60.0)
    ray.kill(broken)
