"""Claim: a model trained with DP-SGD releases any number of tokens, and the ledger charges its training once."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from privmix.budget.reader import read
from privmix.budget.statement import statement
from privmix.coordinator.messages import Delta
from privmix.engine.engine import EngineSettings
from privmix.privacy.settings import Settings
from privmix.shards.shard import ShardActor
from privmix.training.corpus import Corpus
from privmix.training.dp_sgd import plan
from privmix.training.manifest import Manifest
from privmix.training.options import DP_SGD_TRAINING, DpSgdOptions
from privmix.training.plan import run_training
from privmix_cluster.configuration import Configuration
from privmix_cluster.promise import promise
from tests.services.coordinator.actors import end
from tests.support.served_protocols import coordinating, generate
from tests.tiny import write_tiny_model

TOKENS = 5


@pytest.fixture
def trained(cluster: None, tmp_path: Path) -> Iterator[tuple[Path, Manifest]]:
    """An ensemble of one model with its public model, and a shard that serves both."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"user": f"u{n}", "text": f"The {n} ninth lanterns."}) + "\n" for n in range(9))
    )
    model, output = write_tiny_model(tmp_path / "model"), tmp_path / "ensemble"
    private = DpSgdOptions(steps=1, epsilon=2)
    options = DP_SGD_TRAINING.model_copy(update={"block": 16, "precision": "float32"})
    manifest = run_training(plan(Corpus(corpus), output, private=private, model=str(model), options=options)).manifest
    adapters = {part.name: output / part.path for part in manifest.parts}
    settings = EngineSettings(model, "transformers", "float32", 64, part_kind="lora", adapters=adapters)
    shard = ShardActor.options(name="shard").remote(settings)
    ray.get(shard.status.remote())
    yield output, manifest
    end(shard)


async def answer(settings: Settings, ledger: Path, manifest: Manifest, id_: str) -> list[Delta]:
    async with coordinating(settings, ledger, manifest) as (coordinator, _):
        return await generate(coordinator, [id_], TOKENS)


@pytest.mark.slow
def test_the_tokens_cost_only_the_training(trained: tuple[Path, Manifest], tmp_path: Path) -> None:
    folder, manifest = trained
    assert manifest.dp_sgd is not None
    configured = Configuration.of({"ensemble": str(folder), "privacy": {"protocol": "dp-sgd"}})
    settings = promise(configured, manifest).settings
    spent = []
    for round_ in (1, 2):
        deltas = asyncio.run(answer(settings, tmp_path / "ledger.db", manifest, f"round-{round_}"))
        assert sum(delta.tokens for delta in deltas) == TOKENS
        assert not any(delta.public for delta in deltas)
        balance = read(str(tmp_path / "ledger.db"))
        assert balance.charged == {manifest.dp_sgd.event: round_ * TOKENS}
        stated = statement(balance)
        assert stated.epsilon_spent is not None
        spent.append(stated.epsilon_spent)
        assert stated.tokens_left is None
        assert "(2, 1e-05)-differential privacy for any one user" in stated.guarantee
    assert spent[0] == spent[1] == pytest.approx(manifest.dp_sgd.event.epsilon(1e-5), abs=1e-3)
    assert spent[0] <= 2
