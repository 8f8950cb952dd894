"""Claim: the coordinator serves every protocol and charges the full cost of tokens before their release."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import ray

from privmix.budget.actor import NAME
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.budget.statement import statement
from privmix.coordinator.coordinator import Coordinator, CoordinatorSettings
from privmix.coordinator.messages import Delta, Generation
from privmix.engine.engine import EngineSettings
from privmix.fleet.shard_map import PartGroup, ShardMap
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.settings import Settings
from privmix.shards.shard import ShardActor
from privmix.training.manifest import Manifest
from tests.ensembles import write_ensemble
from tests.services.coordinator.actors import NAMESPACE, end, open_budget
from tests.support.steps import until_ended
from tests.tiny import write_tiny_model

PARTS = 2
TOKENS = 3
SEQUENCES = 2

PROMPT = (504, 253, 260)


def models_of(manifest: Manifest, settings: Settings) -> dict[int, str]:
    if settings.mechanism.halves:
        return dict(enumerate(half.name for part in manifest.parts for half in part.halves or ()))
    return {part.index: part.name for part in manifest.parts[: 1 if settings.one_model else PARTS]}


@asynccontextmanager
async def coordinating(
    settings: Settings, ledger: Path, manifest: Manifest, shard: str = "shard"
) -> AsyncIterator[Coordinator]:
    models = models_of(manifest, settings)
    protocol = settings.plan(len(models) // (2 if settings.mechanism.halves else 1))
    keeper = open_budget(ledger, PrivacyBudget.of(manifest.ensemble, settings, protocol))
    chosen = CoordinatorSettings(
        Path(manifest.base_model), NAMESPACE, NAME, when_exhausted=settings.when_exhausted, lease_tokens=4
    )
    coordinator = Coordinator(chosen, ShardMap(1, protocol, (PartGroup(0, models, (shard,)),)))
    try:
        yield coordinator
    finally:
        await coordinator.close()
        ray.get(keeper.give_up.remote())


async def generate(coordinator: Coordinator, ids: Sequence[str], tokens: int = TOKENS) -> list[Delta]:
    """Returns all deltas of one generation per id."""
    options = SamplingOptions(top_k=200)
    await coordinator.submit("channel", [Generation(id_, PROMPT, options, tokens) for id_ in ids])
    return await until_ended(coordinator, len(ids))


@contextmanager
def served(model: Path, folder: Path, shard: str) -> Iterator[Manifest]:
    """Serves a random ensemble with halves from a shard of this name."""
    manifest = Manifest.load(write_ensemble(folder, PARTS, halves=True, model=model))
    adapters = {adapter.name: folder / adapter.path for adapter in manifest.adapters}
    settings = EngineSettings(model, "transformers", "float32", 128, adapters=adapters)
    actor = ShardActor.options(name=shard).remote(settings)
    yield manifest
    end(actor)


@pytest.fixture(scope="module")
def manifest(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manifest]:
    folder = tmp_path_factory.mktemp("protocols")
    with served(write_tiny_model(folder / "model"), folder / "ensemble", "shard") as described:
        yield described


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


# A closed form, a draw of parts, losses measured on the private text, and accounts of the parts.
DEFAULT_RUN = ("pmixed", "exponential", "adapmixed", "individual")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in DEFAULT_RUN)) for name in PROTOCOLS],
)
def test_every_protocol_is_served_and_charged(name: str, ledger: Path, manifest: Manifest) -> None:
    settings = PROTOCOLS[name].model_validate({"protocol": name, "tokens": 50})

    async def serve() -> list[Delta]:
        async with coordinating(settings, ledger, manifest) as coordinator:
            return await generate(coordinator, [f"{name}-{index}" for index in range(SEQUENCES)])

    deltas = asyncio.run(serve())
    assert {delta.finish_reason for delta in deltas} - {None} == {"length"}
    assert sum(delta.tokens for delta in deltas) == SEQUENCES * TOKENS
    assert not any(delta.public for delta in deltas)
    balance = read(ledger)
    ((event, count),) = balance.charged.items()
    assert count == SEQUENCES * TOKENS
    assert event == settings.plan(1 if settings.one_model else PARTS).event
    stated = statement(balance)
    assert (stated.epsilon_measured is not None) == event.measured
    if stated.epsilon_measured is not None:
        assert 0 < stated.epsilon_measured < 8
    if stated.epsilon_spent is not None:
        assert stated.epsilon_spent <= 8


@pytest.fixture
def of_smollm2(cluster: None, public_model: Path, tmp_path: Path) -> Iterator[Manifest]:
    """Parts that are near the public model's, as trained ones are; those of a tiny random model are not."""
    with served(public_model, tmp_path / "ensemble", "large") as described:
        yield described


@pytest.mark.slow
def test_the_public_model_answers_after_submix_stops(ledger: Path, of_smollm2: Manifest) -> None:
    """With a beta far too large for the budget, the parts' budgets last for a few tokens."""
    settings = PROTOCOLS["submix"].model_validate({"protocol": "submix", "beta": 20.0, "epsilon": 3.2})

    async def serve(id_: str) -> list[Delta]:
        async with coordinating(settings, ledger, of_smollm2, "large") as coordinator:
            return await generate(coordinator, [id_], 24)

    deltas = asyncio.run(serve("first"))
    public = [delta.public for delta in deltas if delta.tokens]
    assert public == sorted(public), "after the first public token, all tokens are public"
    assert public[-1]
    stopped = read(ledger)
    assert stopped.stopped
    assert sum(stopped.charged.values()) == public.count(False)
    measured = statement(stopped).epsilon_measured
    assert measured is not None
    assert measured <= 3.2
    again = asyncio.run(serve("second"))
    assert all(delta.public for delta in again if delta.tokens)
    assert any(delta.tokens for delta in again)
    assert read(ledger).charged == stopped.charged
