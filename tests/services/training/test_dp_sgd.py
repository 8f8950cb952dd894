"""Claim: DP-SGD clips a record's or user's whole contribution to a step and adds noise; the manifest has the cost."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer
from typer.testing import CliRunner

from cluster.cli import app
from cluster.configuration import Configuration, ConfigurationError, EnsembleConfiguration
from cluster.promise import promise
from services.errors import InputError
from services.training.adapter import with_lora
from services.training.corpus import Corpus, Document
from services.training.dp_sgd import planned, train
from services.training.manifest import Manifest
from services.training.options import DpSgdOptions, TrainingOptions
from services.training.packing import Tokens, contributions
from services.training.per_unit import Noisy, private_step, unit_gradients, with_hooks
from tests.services.training.conftest import small_documents, write_corpus
from tests.tiny import write_tiny_model

BLOCK = 8
OPTIONS = TrainingOptions(
    attention="own", targets=("q_proj", "v_proj"), block=BLOCK, epochs=2, learning_rate=5e-3, precision="float32"
)
PRIVATE = DpSgdOptions(unit="user", blocks=3, expected_batch=4, epsilon=2, delta=1e-5)
CLIP = 5.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def adapted(tiny: Path) -> Any:
    """The tiny model with a perturbed adapter, because half of the gradients of a new one are 0."""
    torch.manual_seed(1)
    model = with_lora(tiny, "tiny", OPTIONS, torch.device("cpu"))
    for weight in trained(model):
        torch.nn.init.normal_(weight, std=0.3)
    return model.train()


def trained(model: Any) -> list[Tensor]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def texts(count: int, seed: int, longest: int = 3 * BLOCK) -> list[Tokens]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 40000, random.integers(2, longest + 1)).astype(np.int32) for _ in range(count)]


def gradient_alone(model: Any, tokens: Tokens) -> list[Tensor]:
    """Returns the gradient of the mean loss over a unit's tokens, block by block, with PyTorch alone."""
    blocks = [
        torch.from_numpy(tokens[start : start + BLOCK].astype(np.int64)) for start in range(0, len(tokens), BLOCK)
    ]
    losses = torch.cat(
        [cross_entropy(model(block[None]).logits[0, :-1], block[1:], reduction="none") for block in blocks]
    )
    return list(torch.autograd.grad(losses.mean(), trained(model)))


def moved(adapted: Any, units: list[Tokens], noise: float = 0.0) -> Tensor:
    """Returns the change of the weights in a step with learning rate 1 and divisor 1: -sum of clipped gradients."""
    weights = trained(adapted)
    before = [weight.detach().clone() for weight in weights]
    hooked = with_hooks(adapted)
    optimizer = Noisy(
        torch.optim.SGD(weights, lr=1.0), noise_multiplier=noise, max_grad_norm=CLIP, expected_batch_size=1
    )
    private_step(hooked, optimizer, units, BLOCK)
    change = torch.cat([(old - new.detach()).flatten() for old, new in zip(before, weights, strict=True)])
    for weight, old in zip(weights, before, strict=True):
        weight.data.copy_(old)
    hooked.remove_hooks()
    return change


def test_gradients_by_hooks_equal_those_of_single_units(adapted: Any) -> None:
    units = texts(7, seed=0)
    expected = [gradient_alone(adapted, unit) for unit in units]
    unit_gradients(with_hooks(adapted), units, BLOCK)
    for index, weight in enumerate(trained(adapted)):
        alone = torch.stack([gradients[index] for gradients in expected])
        assert alone.abs().max() > 1e-4
        torch.testing.assert_close(weight.grad_sample, alone, rtol=1e-3, atol=1e-6)  # type: ignore[attr-defined]


def test_a_step_sums_the_clipped_gradients_of_the_units(adapted: Any) -> None:
    """The units have more blocks than one pass holds in memory."""
    units = texts(60, seed=1)
    expected = torch.zeros(sum(weight.numel() for weight in trained(adapted)))
    lengths = []
    for unit in units:
        gradient = torch.cat([part.flatten() for part in gradient_alone(adapted, unit)])
        lengths.append(float(gradient.norm()))
        expected += gradient * min(1.0, CLIP / lengths[-1])
    assert min(lengths) < CLIP < max(lengths)
    torch.testing.assert_close(moved(adapted, units), expected, rtol=1e-3, atol=1e-4)


def test_a_user_changes_the_sum_by_at_most_the_clip(adapted: Any) -> None:
    """It holds for any text of any number of blocks, and some texts attain the bound."""
    others = texts(5, seed=2)
    without = moved(adapted, others)
    moves = []
    for user in texts(12, seed=3, longest=12 * BLOCK):
        added = moved(adapted, [*others, user])
        moves.append(float((added - without).norm()))
    assert max(moves) <= CLIP * (1 + 1e-4)
    assert max(moves) > 0.99 * CLIP
    replaced = [moved(adapted, [*others, user]) for user in texts(6, seed=4)]
    assert max(float((before - after).norm()) for before, after in pairwise(replaced)) <= 2 * CLIP * (1 + 1e-4)


@pytest.mark.parametrize("count", [0, 3])
def test_the_sum_is_noised_with_the_clip_times_the_multiplier(adapted: Any, count: int) -> None:
    """This includes an empty batch, because its emptiness is private."""
    units, noise = texts(count, seed=5), 3.0
    still = moved(adapted, units)
    drawn = torch.stack([moved(adapted, units, noise) - still for _ in range(50)]) / (noise * CLIP)
    n = drawn.numel()
    assert n > 10_000
    # The probability of 6 standard deviations is below 1e-8.
    assert abs(float(drawn.mean())) < 6 / math.sqrt(n)
    assert abs(float(drawn.var()) - 1) < 6 * math.sqrt(2 / n)
    assert float((drawn[0] - drawn[1]).abs().min()) >= 0
    assert len(drawn.unique(dim=0)) == len(drawn)


def test_a_contribution_is_the_beginning_of_a_users_text(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    documents = [
        Document("a", "one two three"),
        Document("b", "four"),
        Document("a", "five six"),
        Document("c", "x" * 99),
    ]
    alone = contributions(documents, tokenizer, "record", 1000)
    assert len(alone) == 4
    assert all(unit[-1] == tokenizer.eos_token_id for unit in alone)
    users = contributions(documents, tokenizer, "user", 1000)
    np.testing.assert_array_equal(users[0], np.concatenate([alone[0], alone[2]]))
    np.testing.assert_array_equal(users[1], alone[1])
    capped = contributions(documents, tokenizer, "user", 4)
    assert [len(unit) for unit in capped] == [4, 2, 4]
    np.testing.assert_array_equal(capped[0], users[0][:4])


def test_with_a_population_the_plan_does_not_depend_on_the_corpus() -> None:
    chosen = PRIVATE.model_copy(update={"population": 50})
    small, large = planned(chosen, OPTIONS, 5), planned(chosen, OPTIONS, 500)
    assert (small.sampling_rate, small.steps) == (large.sampling_rate, large.steps) == (4 / 50, 25)
    assert small.noise_multiplier == large.noise_multiplier
    assert small.run != large.run
    assert planned(PRIVATE, OPTIONS, 50).sampling_rate == 4 / 50, "without a population, the corpus's size counts"
    assert planned(PRIVATE, OPTIONS, 2).sampling_rate == 1
    with pytest.raises(InputError, match="epsilon 1e-09 at delta"):
        planned(PRIVATE.model_copy(update={"epsilon": 1e-9}), OPTIONS, 2)


def configured(folder: Path, **privacy: object) -> EnsembleConfiguration:
    return Configuration.of(
        {"ensemble": str(folder), "privacy": privacy, "budget": {"ledger": str(folder / "ledger.db")}}
    ).choose()


@pytest.mark.slow
def test_an_ensemble_of_one_is_served_as_trained(tiny: Path, tmp_path: Path) -> None:
    corpus = Corpus(write_corpus(tmp_path / "corpus.jsonl", small_documents()))
    output = tmp_path / "ensemble"
    done = train(corpus, output, private=PRIVATE, model=str(tiny), options=OPTIONS)
    manifest = Manifest.load(output)
    manifest.verify(output)
    assert (done.trained, done.manifest) == (1, manifest)
    assert manifest.dp_sgd is not None
    event = manifest.dp_sgd.event
    assert (event.unit, event.sampling_rate, event.steps) == ("user", 4 / 6, 3)
    assert event.epsilon(1e-5) <= 2
    weights = load_file(manifest.adapter_path(output, manifest.parts[0]) / "adapter_model.safetensors")
    assert any(bool(weight.any()) for name, weight in weights.items() if "lora_B" in name)
    promised = promise(configured(output, protocol="dp-sgd"), manifest)
    assert promised.protocol.event == event
    assert (promised.terms.epsilon, promised.terms.delta) == (2, 1e-5)
    assert promised.terms.adjacency == "user"
    assert "any number of released tokens, (2, 1e-05)-differential privacy for any one user" in promised.sentence
    for protocol in ("pmixed", "finetuned", "ensemble"):
        with pytest.raises(ConfigurationError, match="choose `protocol: dp-sgd`"):
            promise(configured(output, protocol=protocol), manifest)
    assert promise(configured(output, protocol="public"), manifest)
    with pytest.raises(ConfigurationError, match="which is more than 1;"):
        promise(configured(output, protocol="dp-sgd", epsilon=1.0), manifest)
    with pytest.raises(InputError, match="attention: DP-SGD trains an adapter with keys and values of its own"):
        train(corpus, output, private=PRIVATE, model=str(tiny), options=TrainingOptions())
    again = train(corpus, output, private=PRIVATE, model=str(tiny), options=OPTIONS)
    assert (again.kept, again.manifest) == (1, manifest), "a repeated command neither trains nor charges again"
    other = train(corpus, output, private=PRIVATE.model_copy(update={"clip": 2.0}), model=str(tiny), options=OPTIONS)
    assert other.manifest.dp_sgd is not None
    assert other.manifest.dp_sgd.event.run != event.run
    assert other.manifest.ensemble == manifest.ensemble


def test_an_ensemble_without_dp_sgd_is_not_served_as_dp_sgd(ensemble: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="trained without privacy"):
        promise(configured(ensemble.directory, protocol="dp-sgd"), ensemble.trained.manifest)


@pytest.mark.slow
def test_the_command_prints_the_guarantee(tiny: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", small_documents())
    arguments = [
        "train",
        str(corpus),
        "--output",
        str(tmp_path / "new"),
        "--model",
        str(tiny),
        "--dp-sgd",
        "--block",
        "16",
    ]
    done = CliRunner().invoke(app, [*arguments, "--expected-batch", "12", "--epochs", "1"])
    assert done.exit_code == 0, done.output
    assert "(8, 1e-05)-differential privacy for any one record" in done.stdout
    refused = CliRunner().invoke(app, [*arguments, "--unit", "part"])
    assert refused.exit_code == 2
    assert "unit" in refused.stderr
    kept = CliRunner().invoke(app, [*arguments, "--expected-batch", "12", "--epochs", "1", "--json"])
    summary = json.loads(kept.stdout)
    assert (summary["kept"], summary["dp_sgd"]["event"]["unit"]) == (1, "record")
