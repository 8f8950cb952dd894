"""Claim: the coordinator releases the same from the shards' partials as from raw rows, for any number of shards.

To the last integer; with individual budgets to float32's rounding of a tilt's centre, on which nothing rests. And a
shard that has all parts makes the same tokens of the same points beside its rows as the coordinator from its partials.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import set_num_threads  # bound before an engine of vLLM in this process makes torch's do nothing

from services.coordinator import ensemble
from services.coordinator.ensemble import Query, ShardedEnsemble
from services.coordinator.pending_release import PendingRelease
from services.engine.engine import EngineSettings, Request
from services.fleet.shard_map import PartGroup, ShardMap
from services.privacy.mollifiers.shaping import SamplingOptions
from services.privacy.protocol import Protocol
from services.privacy.protocols.exponential import Exponential
from services.privacy.protocols.individual import WHOLE, IndividualSettings
from services.privacy.protocols.pmixed import PMixed
from services.privacy.sampling import categorical
from services.shard import LostStepError, Shard
from tests.ensembles import write_adapters
from tests.tiny import write_tiny_model

PARTS = 4
PROTOCOLS = (
    PMixed(PARTS, 0.5, 0.4),
    Exponential(PARTS, 3, 1.0),
    IndividualSettings(tokens=16).plan(PARTS),
)
QUERIES = (
    Query("a", (504, 253, 260), True),
    Query("base", (504, 253), False),
    Query("b", (27, 10, 99, 504, 253), True),
)
OPTIONS = (SamplingOptions(top_k=200), SamplingOptions(top_p=0.9), SamplingOptions(temperature=0.7))


class FirstRows:
    """Makes engines of one model return the first row that any of them computed for a context and a part.

    A row has another rounding where its context is read in other pieces. The claim is about what follows the rows.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}

    def of(self, compute: Callable[[Sequence[Request]], torch.Tensor]) -> Callable[[Sequence[Request]], torch.Tensor]:
        def row(request: Request, part: str) -> torch.Tensor:
            key = request.tokens, part
            if key not in self._rows:
                self._rows[key] = compute([replace(request, adapters=(part,))])[0]
            return self._rows[key]

        return lambda requests: torch.stack([row(request, part) for request in requests for part in request.adapters])


class Local:
    """Calls a shard in this process as Ray's handle of an actor does."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            return getattr(self._shard, name)(*arguments)

        return SimpleNamespace(remote=call)


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


def asked(shards: dict[tuple[int, int], Shard], protocol: Protocol, count: int) -> ShardedEnsemble:
    size = PARTS // count
    firsts = range(0, PARTS, size)
    groups = [
        PartGroup(at, {part: f"part-{part}" for part in range(first, first + size)}, (str(first),))
        for at, first in enumerate(firsts)
    ]
    handles: dict[str, Any] = {str(first): Local(shards[first, size]) for first in firsts}
    return ShardedEnsemble(ShardMap(1, protocol, tuple(groups)), handles.__getitem__, 60.0, 5.0)


@pytest.mark.exact
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_partials_release_what_raw_rows_release(
    protocol: Protocol, count: int, shards: dict[tuple[int, int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensemble, "_caller", lambda: "test")
    draws = {"a": protocol.draw(), "b": protocol.draw()}
    allowances: Sequence[Sequence[int]] = ()
    if protocol.event.accounts:
        allowances = [[WHOLE // 16] * PARTS, [0, 1, WHOLE // 3, WHOLE]]

    async def run() -> tuple[PendingRelease, PendingRelease]:
        whole = asked(shards, protocol, count)
        monkeypatch.setattr(whole._draws, "current", draws.__getitem__)
        partials = await whole.reduce(QUERIES, OPTIONS, allowances)
        assert partials.private == (True, False, True)
        rows = await whole.ask(QUERIES)
        return (
            PendingRelease.combined(protocol, partials, "cpu"),
            PendingRelease.of(protocol, rows, OPTIONS, "cpu", allowances),
        )

    reduced, raw = asyncio.run(run())
    assert torch.equal(reduced.public, raw.public)
    assert reduced.private == raw.private == (0, 2)
    assert reduced.weights is not None
    assert raw.weights is not None
    if protocol.event.accounts:
        torch.testing.assert_close(reduced.weights / 2.0**61, raw.weights / 2.0**61, rtol=1e-4, atol=2.0**-60)
        assert reduced.charges is not None
        assert raw.charges is not None
        for ours, theirs, allowed in zip(reduced.charges, raw.charges, allowances, strict=True):
            assert all(
                abs(x - y) <= 1 + 1e-3 * y and x <= most for x, y, most in zip(ours, theirs, allowed, strict=True)
            )
        assert any(reduced.charges[0])
    else:
        assert torch.equal(reduced.weights, raw.weights)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_a_shard_makes_the_same_tokens_of_the_same_points(
    protocol: Protocol, shards: dict[tuple[int, int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensemble, "_caller", lambda: "test")
    draws = {"a": protocol.draw(), "b": protocol.draw()}
    allowances = [[WHOLE // 16] * PARTS, [0, 1, WHOLE // 3, WHOLE]] if protocol.event.accounts else []

    async def run() -> None:
        whole = asked(shards, protocol, 1)
        assert whole.samples
        monkeypatch.setattr(whole._draws, "current", draws.__getitem__)
        partials = await whole.reduce(QUERIES, OPTIONS, allowances)
        pending = PendingRelease.combined(protocol, partials, "cpu")
        for share in range(20):
            held = await whole.weigh(QUERIES, OPTIONS, allowances)
            points = [share * total // 20 + share for total in held.totals]
            drawn = dict(zip(held.totals, points, strict=True))
            monkeypatch.setattr(categorical, "uniform_below", drawn.__getitem__)
            chosen = ({0, 2}, {1}) if share % 2 else ({2}, {1})
            assert await whole.sample(held, *chosen) == pending.sample(*chosen)
        assert held.private == partials.private
        assert held.computed == partials.computed
        assert held.received < 10 * 8 * len(QUERIES) * PARTS < partials.received
        assert [list(own) for own in held.charges] == [list(own) for own in partials.charges]

    asyncio.run(run())


def test_only_a_shard_with_all_parts_samples(shards: dict[tuple[int, int], Shard]) -> None:
    assert not asked(shards, PROTOCOLS[0], 2).samples
    assert not asked(shards, PMixed(PARTS, 0.5, mollifier="renyi", order=3, loss=0.1), 1).samples


def test_weights_make_one_token_and_none_when_they_are_lost(
    shards: dict[tuple[int, int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensemble, "_caller", lambda: "test")

    async def run() -> None:
        whole = asked(shards, PROTOCOLS[1], 1)
        held = await whole.weigh(QUERIES, OPTIONS)
        for confused in (({0, 1}, set()), ({0}, {1, 2})):
            with pytest.raises(ValueError, match="free must name public ones"):
                await whole.sample(held, *confused)
        assert set(await whole.sample(held, {0, 2}, ())) == {0, 2}
        with pytest.raises(LostStepError):
            await whole.sample(held, (), {1})
        held = await whole.weigh(QUERIES, OPTIONS)
        await whole.weigh(QUERIES, OPTIONS)
        with pytest.raises(LostStepError):
            await whole.sample(held, {0}, ())

    asyncio.run(run())


@pytest.mark.parametrize("points", [[0, 0], [0, -2, 0], "totals"])
def test_points_outside_the_totals_make_no_token(
    points: Any, shards: dict[tuple[int, int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensemble, "_caller", lambda: "test")

    async def run() -> None:
        held = await asked(shards, PROTOCOLS[1], 1).weigh(QUERIES, OPTIONS)
        (batch,) = held.held
        given = batch.weighed.totals if points == "totals" else np.array(points)
        with pytest.raises(ValueError, match="points must be"):
            shards[0, PARTS].pick(batch.key, given)

    asyncio.run(run())
