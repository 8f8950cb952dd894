"""Claim: shards make the same tokens of the same points as the coordinator from raw rows, for any number of shards.

To the last integer; with individual budgets to float32's rounding of a tilt's centre, on which nothing rests.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError, RayTaskError
from torch import set_num_threads  # bound before an engine of vLLM in this process makes torch's do nothing

from privmix.coordinator import group
from privmix.coordinator.arithmetic import Arithmetic
from privmix.coordinator.copies import ShardCopies
from privmix.coordinator.ensemble import ShardedEnsemble
from privmix.coordinator.group import Group
from privmix.coordinator.held_weights import HeldWeights, weigh
from privmix.coordinator.raw_rows import RawRows, collect
from privmix.coordinator.step import Step
from privmix.engine.engine import EngineSettings, Request
from privmix.fleet.shard_map import PartGroup, ShardMap
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions, shape
from privmix.privacy.protocol import Protocol, Release
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.individual import WHOLE, IndividualSettings
from privmix.privacy.protocols.pmixed import PMixed
from privmix.privacy.protocols.public import Public
from privmix.privacy.sampling import categorical
from privmix.shards.line import LineAddress, LineServer
from privmix.shards.sessions import Asked, Sessions
from privmix.shards.shard import Shard
from tests.ensembles import write_adapters
from tests.tiny import write_tiny_model

PARTS = 4
PROTOCOLS = (
    PMixed(PARTS, 0.5, 0.4),
    Exponential(PARTS, 3, 1.0),
    IndividualSettings(tokens=16).plan(PARTS),
)
SEQUENCES = {"a": (504, 253, 260), "b": (27, 10, 99, 504, 253), "base": (504, 253)}
"""The public model alone answers the last of them."""
OPTIONS = (SamplingOptions(top_k=200), SamplingOptions(temperature=0.7), SamplingOptions(top_p=0.9))


def step(protocol: Protocol) -> Step:
    draws = (protocol.draw(), protocol.draw())
    allowances = np.array([[WHOLE // 16] * PARTS, [0, 1, WHOLE // 3, WHOLE]]) if protocol.event.accounts else None
    lengths, salts = tuple(map(len, SEQUENCES.values())), (None,) * len(SEQUENCES)
    return Step(tuple(SEQUENCES), tuple(SEQUENCES.values()), lengths, salts, OPTIONS, draws, allowances)


class FirstRows:
    """Makes engines of one model return the first row that any of them computed for a context and a part.

    A row has another rounding where its context is read in other pieces. The claim is about what follows the rows.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}

    def of(self, compute: Callable[[Sequence[Request]], torch.Tensor]) -> Callable[[Sequence[Request]], torch.Tensor]:
        def row(request: Request, part: str) -> torch.Tensor:
            key = tuple(request.tokens), part
            if key not in self._rows:
                self._rows[key] = compute([replace(request, adapters=(part,))])[0]
            return self._rows[key]

        return lambda requests: torch.stack([row(request, part) for request in requests for part in request.adapters])


class Local:
    """Calls a shard in this process as Ray's handle of an actor does."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __getattr__(self, name: str) -> Any:
        async def called(*arguments: Any, **options: Any) -> Any:
            return getattr(self._shard, name)(*arguments, **options)

        def call(*arguments: Any, **options: Any) -> Any:
            return asyncio.create_task(called(*arguments, **options))

        by_a_peer = partial(partial, self._shard.partial)
        return SimpleNamespace(remote=by_a_peer if name == "partial" else call)


def answer(call: Callable[[], Any], timeout: float) -> Any:
    """Stands for `ray.get`, which tells where a method failed."""
    try:
        return call()
    except Exception as error:
        raise RayTaskError("partial", "", error) from error


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[int, int], Shard]]:
    """Yields shards by their first part and their number of parts: one of all, and two of half."""
    folder = tmp_path_factory.mktemp("partials")
    model = write_tiny_model(folder / "model")
    names = [f"part-{index}" for index in range(PARTS)]
    adapters = write_adapters(folder / "parts", names, model)
    made = {
        (first, count): Shard(
            EngineSettings(
                model,
                "transformers",
                "float32",
                128,
                adapters={name: adapters[name] for name in names[first : first + count]},
            )
        )
        for first, count in ((0, 4), (0, 2), (2, 2))
    }
    rows = FirstRows()
    for shard in made.values():
        shard._engine.logits = rows.of(shard._engine.logits)  # type: ignore[assignment, method-assign]
    threads = torch.get_num_threads()
    set_num_threads(1)  # a sum that threads divide has another rounding
    yield made
    set_num_threads(threads)


def groups(shards: dict[tuple[int, int], Shard], protocol: Protocol, count: int) -> list[Group]:
    """Returns groups of all parts, with one shard each."""
    size = PARTS // count
    firsts = range(0, PARTS, size)
    handles: dict[str, Any] = {str(first): Local(shards[first, size]) for first in firsts}
    return [
        Group(
            PartGroup(at, {part: f"part-{part}" for part in range(first, first + size)}, (str(first),)),
            protocol,
            ShardCopies((str(first),), handles.__getitem__, 5.0),
        )
        for at, first in enumerate(firsts)
    ]


@pytest.fixture(autouse=True)
def outside_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_caller", lambda: "test")
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: (calls, []))
    monkeypatch.setattr(ray, "get", answer)


def raw_release(rows: RawRows) -> tuple[torch.Tensor, Release]:
    """Returns p0 of each sequence, and the release of raw rows of the private ones."""
    models = (*rows.step.draws, ())
    log_p0, log_p = (torch.from_numpy(np.stack(own)) for own in (rows.public, rows.drawn))
    answers = shape(log_p0, log_p, models, OPTIONS)
    granted = None if rows.step.allowances is None else torch.from_numpy(rows.step.allowances)
    private = replace(answers.first(rows.step.private), allowances=granted)
    return answers.public, rows.protocol.distribution(private)


@pytest.mark.exact
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_shards_hold_the_weights_of_raw_rows(
    protocol: Protocol, count: int, shards: dict[tuple[int, int], Shard]
) -> None:
    asked = step(protocol)

    async def run() -> tuple[HeldWeights, RawRows]:
        own = groups(shards, protocol, count)
        return await weigh(own, 60.0, asked), await collect(own, protocol, Arithmetic(1, "cpu"), asked)

    held, rows = asyncio.run(run())
    (batch,) = held.held
    cumulative = shards[0, PARTS // count]._kept[batch.batch.key].held
    assert isinstance(cumulative, torch.Tensor)
    assert batch.totals.tolist() == cumulative[:, -1].tolist()
    assert held.computed == rows.computed
    assert held.received < 10 * 8 * len(SEQUENCES) * PARTS < rows.received
    weights = cumulative.diff(dim=1, prepend=torch.zeros(len(cumulative), 1, dtype=torch.int64))
    public, raw = raw_release(rows)
    assert torch.equal(weights[asked.private :], categorical.quantise(public[asked.private :]))
    if asked.allowances is not None:
        torch.testing.assert_close(weights[: asked.private] / 2.0**61, raw.weights / 2.0**61, rtol=1e-4, atol=2.0**-60)
        assert raw.charges is not None
        charges = asyncio.run(held.mix()).charges
        for ours, theirs, allowed in zip(charges, raw.charges.tolist(), asked.allowances.tolist(), strict=True):
            assert all(
                abs(x - y) <= 1 + 1e-3 * y and x <= most for x, y, most in zip(ours, theirs, allowed, strict=True)
            )
        assert any(charges[0])
    else:
        assert torch.equal(weights[: asked.private], raw.weights)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_a_token_is_where_its_point_lies(
    protocol: Protocol, count: int, shards: dict[tuple[int, int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = step(protocol)

    async def run() -> None:
        own = groups(shards, protocol, count)
        for portion in range(20):
            held = await weigh(own, 60.0, asked)
            (batch,) = held.held
            cumulative: Any = shards[0, PARTS // count]._kept[batch.batch.key].held
            points = [portion * total // 20 + portion for total in batch.totals.tolist()]
            drawn = dict(zip(batch.totals.tolist(), points, strict=True))
            monkeypatch.setattr(categorical, "uniform_below", drawn.__getitem__)
            paid, free = ({0, 1}, {2}) if portion % 2 else ({1}, {2})
            tokens = await held.sample(paid, free)
            assert tokens == {at: int((cumulative[at] <= points[at]).sum()) for at in sorted(paid | free)}

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2])
def test_raw_rows_leave_the_shards_of_protocols_that_need_them_together(
    count: int, shards: dict[tuple[int, int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")  # handles of this process cannot be sent
    raw = PMixed(PARTS, 0.5, mollifier="renyi", order=3, loss=0.1), Public(PARTS)
    for protocol, kind in ((PROTOCOLS[0], HeldWeights), *((each, RawRows) for each in raw)):
        size = PARTS // count
        parts = [
            PartGroup(at, {part: f"part-{part}" for part in range(at * size, (at + 1) * size)}, (str(at * size),))
            for at in range(count)
        ]
        handles: dict[str, Any] = {own.shards[0]: Local(shards[int(own.shards[0]), size]) for own in parts}
        ensemble = ShardedEnsemble(
            ShardMap(1, protocol, tuple(parts)), handles.__getitem__, Arithmetic(1, "cpu"), 60.0, 5.0
        )
        result = asyncio.run(ensemble.ask(step(protocol)))
        asyncio.run(result.mix())
        assert type(result) is kind


@pytest.mark.parametrize("tls", ["0", "1"])
def test_calls_take_a_connection_unless_ray_encrypts(
    tls: str, shards: dict[tuple[int, int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, asked = shards[0, PARTS], list[LineAddress]()

    def line() -> LineAddress:
        asked.append(LineServer(shard, shard._thread, "127.0.0.1").address)
        return asked[-1]

    monkeypatch.setenv("RAY_USE_TLS", tls)
    monkeypatch.setattr(shard, "line", line)
    whole = PartGroup(0, {part: f"part-{part}" for part in range(PARTS)}, ("0",))
    shard_map = ShardMap(1, PROTOCOLS[0], (whole,))
    ensemble = ShardedEnsemble(shard_map, lambda _: Local(shard), Arithmetic(1, "cpu"), 60.0, 5.0)
    asyncio.run(ensemble.ask(step(PROTOCOLS[0])))
    assert len(asked) == (tls == "0")


@pytest.mark.parametrize("count", [1, 2])
def test_weights_make_one_token_and_none_when_they_are_lost(count: int, shards: dict[tuple[int, int], Shard]) -> None:
    asked = step(PROTOCOLS[1])

    async def run() -> None:
        own = groups(shards, PROTOCOLS[1], count)
        held = await weigh(own, 60.0, asked)
        for confused in (({0, 2}, set[int]()), ({0}, {1, 2})):
            with pytest.raises(ValueError, match="free must name public ones"):
                await held.sample(*confused)
        assert set(await held.sample({0, 1}, ())) == {0, 1}
        with pytest.raises(CoordinatorUnavailable, match="LostStepError"):
            await held.sample((), {2})
        own = groups(shards, PROTOCOLS[1], count)
        held = await weigh(own, 60.0, asked)
        await weigh(own, 60.0, asked)
        with pytest.raises(CoordinatorUnavailable, match="LostStepError"):
            await held.sample({0}, ())

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2])
def test_a_shard_that_forgets_is_told_everything_again(count: int, shards: dict[tuple[int, int], Shard]) -> None:
    """As after a restart between two steps. No step fails."""
    first = step(PROTOCOLS[1])
    contexts = tuple((*context, 9) for context in first.contexts)
    longer = replace(first, contexts=contexts, lengths=tuple(map(len, contexts)))

    async def run() -> None:
        own = groups(shards, PROTOCOLS[1], count)
        await weigh(own, 60.0, first)
        for shard in shards.values():
            shard._sessions = Sessions()
        (batch,) = (await weigh(own, 60.0, longer)).held
        assert len(batch.totals) == len(SEQUENCES)

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_a_step_that_begins_before_its_tokens_are_known_has_the_same_weights(
    protocol: Protocol, count: int, shards: dict[tuple[int, int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        own, asked, contexts = groups(shards, protocol, count), step(protocol), list(map(list, SEQUENCES.values()))
        held = await weigh(own, 60.0, asked)
        for sampled in ({0, 1, 2}, {1, 2}):  # the client of one leaves
            picking = held.sample(sampled - {2}, {2})
            await asyncio.sleep(0)
            lengths = tuple(len(context) + (at in sampled) for at, context in enumerate(contexts))
            following = replace(asked, contexts=tuple(contexts), lengths=lengths)
            computing = asyncio.create_task(weigh(own, 60.0, following))
            for at, token in (await picking).items():
                contexts[at].append(token)
            held = await computing
            with monkeypatch.context() as patch:
                patch.setattr(group, "_caller", lambda: "another")
                (one,), (other,) = held.held, (await weigh(groups(shards, protocol, count), 60.0, following)).held
            assert one.totals.tolist() == other.totals.tolist()
            assert one.charges is None or (one.charges == other.charges).all()

    asyncio.run(run())


@pytest.mark.parametrize("lost", [(0, 2), (2, 2)])
def test_a_step_fails_where_a_shard_loses_its_part_of_it(
    lost: tuple[int, int], shards: dict[tuple[int, int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `begin` and `keep` hold; nothing is charged before the totals, and the step is repeated."""
    monkeypatch.setattr(shards[lost], "_hold", lambda *_: None)

    async def run() -> None:
        with pytest.raises(CoordinatorUnavailable, match="LostStepError"):
            await weigh(groups(shards, PROTOCOLS[1], 2), 60.0, step(PROTOCOLS[1]))

    asyncio.run(run())


def test_another_copy_is_asked_where_one_gives_no_partial(
    shards: dict[tuple[int, int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a method that refuses the step is raised as it is."""
    cancelled = list[Any]()

    def late(_: Any, timeout: float) -> Any:
        raise GetTimeoutError

    def refused(_: Any, timeout: float) -> Any:
        raise RayTaskError("partial", "", ValueError("too much"))

    async def run() -> None:
        names, handles = ("one", "other"), [Local(shards[first, 2]) for first in (0, 2)]
        own = [
            Group(
                PartGroup(at, {part: f"part-{part}" for part in (2 * at, 2 * at + 1)}, names),
                PROTOCOLS[1],
                ShardCopies(names, lambda _, handle=handle: handle, 5.0),  # type: ignore[misc]
            )
            for at, handle in enumerate(handles)
        ]
        assert own[1].copies.order("a") == (1, 0)
        with monkeypatch.context() as patch:
            patch.setattr(ray, "wait", lambda calls, num_returns, timeout: ([], calls if timeout == 5.0 else []))
            patch.setattr(ray, "cancel", cancelled.append)
            patch.setattr(ray, "get", late)
            with pytest.raises(CoordinatorUnavailable, match=r"no partial of groups 1 \(GetTimeoutError\)"):
                await weigh(own, 60.0, step(PROTOCOLS[1]))
            patch.setattr(ray, "get", refused)
            with pytest.raises(ValueError, match="too much"):
                await weigh(own, 60.0, step(PROTOCOLS[1]))
        assert len(cancelled) == 2
        assert [each.copies.order("a") for each in own] == [(1, 0), (0, 1)]

    asyncio.run(run())


def test_nothing_is_told_of_a_step_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the ensemble's size it would bring back the terms of before."""
    monkeypatch.setattr(ray, "cancel", lambda _: None)
    asked_of: list[str] = []

    def silent(name: str) -> Any:
        async def keep(_: Asked) -> None:
            asked_of.append(name)
            await asyncio.Event().wait()

        return SimpleNamespace(keep=SimpleNamespace(remote=keep))

    def of(at: int, names: tuple[str, ...], actor: Callable[[str], Any]) -> Group:
        models = {part: f"part-{part}" for part in (2 * at, 2 * at + 1)}
        return Group(PartGroup(at, models, names), PROTOCOLS[1], ShardCopies(names, actor, 0.01))

    async def run() -> None:
        with pytest.raises(CoordinatorUnavailable, match="'dead' is not alive"):
            own = [of(0, ("dead",), _no_actor), of(1, ("one", "other"), silent)]
            await weigh(own, 60.0, step(PROTOCOLS[1]))
        failed = len(asked_of)
        await asyncio.sleep(0.1)
        assert len(asked_of) == failed

    asyncio.run(run())


def _no_actor(_: str) -> Any:
    raise ValueError


@pytest.mark.parametrize("points", [[0, 0], [0, -2, 0], "totals"])
def test_points_outside_the_totals_make_no_token(points: Any, shards: dict[tuple[int, int], Shard]) -> None:
    async def run() -> None:
        (whole,) = groups(shards, PROTOCOLS[1], 1)
        (held,) = (await weigh([whole], 60.0, step(PROTOCOLS[1]))).held
        given = held.totals if points == "totals" else np.array(points)
        with pytest.raises(ValueError, match="points must be"):
            shards[0, PARTS].pick(held.batch.key, given, [])

    asyncio.run(run())
