"""Claim: DP-SGD clips a user's whole contribution to a step and adds noise; the manifest has the cost."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from privmix.foundation.errors import ConfigurationError, InputError
from privmix.privacy.sampling.clipping import GRAINS, noised
from privmix.training import dp_sgd, per_unit
from privmix.training.adapter import TOKENS_AT_ONCE, with_lora
from privmix.training.corpus import Corpus, Document
from privmix.training.dp_sgd import plan, planned
from privmix.training.manifest import Manifest, PrivateTraining
from privmix.training.options import DpSgdOptions, TrainingOptions
from privmix.training.packing import Tokens, contributions, even_size
from privmix.training.per_unit import UnitGradients, train_adapter
from privmix.training.plan import run_training
from privmix.training.row_gradients import RowGradients
from privmix_cluster.configuration import Configuration
from privmix_cluster.promise import promise
from tests.support.cli import privmix, refused, reported
from tests.support.training import small_documents, write_corpus

BLOCK = 8
OPTIONS = TrainingOptions(
    part_kind="lora", targets=("q_proj", "v_proj"), block=BLOCK, learning_rate=5e-3, precision="float32"
)
PRIVATE = DpSgdOptions(blocks=3, steps=3, epsilon=2, delta=1e-5)
CLIP = 5.0
CPU = torch.device("cpu")


@pytest.fixture
def adapted(tiny: Path) -> Any:
    """The tiny model with a perturbed adapter, of which B is trained."""
    torch.manual_seed(1)
    model = with_lora(tiny, "tiny", OPTIONS, CPU)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
            weight.requires_grad_("lora_B" in name)
    return model


def trained(model: Any) -> list[Tensor]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def texts(count: int, seed: int, longest: int = 3 * BLOCK) -> list[Tokens]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 40000, random.integers(2, longest + 1)).astype(np.int32) for _ in range(count)]


def gradient_alone(model: Any, tokens: Tokens) -> Tensor:
    """Returns the gradient of the mean loss over a unit's tokens, block by block, with PyTorch alone."""
    size = even_size(len(tokens), BLOCK)
    blocks = [torch.from_numpy(tokens[start : start + size].astype(np.int64)) for start in range(0, len(tokens), size)]
    losses = torch.cat(
        [cross_entropy(model(block[None]).logits[0, :-1], block[1:], reduction="none") for block in blocks]
    )
    gradients = torch.autograd.grad(losses.mean(), trained(model))
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_the_sum_has_the_clipped_gradient_of_every_unit(adapted: Any) -> None:
    """The units have several rows, or a single token, which has no loss."""
    units = [*texts(16, seed=1, longest=6 * BLOCK), np.array([7], np.int32)]
    alone = [gradient_alone(adapted, unit) for unit in units[:-1]]
    lengths = [float(gradient.norm()) for gradient in alone]
    assert min(lengths) < CLIP < max(lengths)
    expected = sum(
        (gradient * min(1.0, CLIP / length) for gradient, length in zip(alone, lengths, strict=True)), torch.zeros(1)
    )
    total = UnitGradients(adapted, BLOCK).clipped_sum(units, CLIP)
    torch.testing.assert_close((total * (CLIP / GRAINS)).float(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.exact
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_user_moves_the_sum_by_what_it_adds_alone_to_the_last_bit(tiny: Path, precision: str) -> None:
    """It changes neither the rounding of the others' gradients nor that of their sum; nor does their order."""
    gradients = UnitGradients(with_lora(tiny, "tiny", options_in(precision), CPU), BLOCK)
    users = texts(6, seed=4, longest=3 * BLOCK)
    total = gradients.clipped_sum(users[::-1], CLIP)
    alone = [gradients.clipped_sum([user], CLIP) for user in users]
    for left in (0, int(np.argmax([len(user) for user in users]))):
        without = gradients.clipped_sum(users[:left] + users[left + 1 :], CLIP)
        assert torch.equal(total - without, alone[left])
    lengths = [math.isqrt(sum(int(grain) ** 2 for grain in own)) for own in alone]
    assert 0.999 * GRAINS < max(lengths) < GRAINS, "in whole numbers, without rounding"


@pytest.mark.exact
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_users_share_a_pass_without_a_bit_that_shows_it(
    tiny: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users of similar length fill passes, unless a processor's operators tell; one of them is not finite."""
    passed = spied_passes(monkeypatch)
    gradients = UnitGradients(with_lora(tiny, "tiny", options_in(precision), CPU), BLOCK)
    users = [tokens[:BLOCK] for tokens in texts(40, seed=7)]
    embedding = gradients._rows._model.get_input_embeddings().weight.data
    embedding[int(users[5][0])] = math.inf
    together = dict(gradients.of(users))
    assert max(passed) == TOKENS_AT_ONCE["cpu"] // 16
    passed.clear()
    for index, user in enumerate(users):
        ((_, alone),) = gradients.of([user])
        assert torch.equal(alone, together[index]) or (index == 5 and not alone.isfinite().all())
    assert set(passed) == {1}


def test_users_share_no_pass_whose_places_differ(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the bits of a gradient follow from the number of rows in the pass."""
    passed = spied_passes(monkeypatch, fault=1e-6)
    gradients = UnitGradients(with_lora(tiny, "tiny", OPTIONS, CPU), BLOCK)
    users = [tokens[:BLOCK] for tokens in texts(40, seed=7)]
    total = gradients.clipped_sum(users, CLIP)
    assert max(passed) > 1, "it was tried"
    assert passed[-40:] == [1] * 40
    assert torch.equal(total - gradients.clipped_sum(users[1:], CLIP), gradients.clipped_sum(users[:1], CLIP))


def spied_passes(monkeypatch: pytest.MonkeyPatch, fault: float = 0.0) -> list[int]:
    """Returns the list to which each pass will add its number of places, on which its gradients depend by `fault`."""
    passed: list[int] = []
    original = RowGradients._pass

    def spied(self: RowGradients, rows: Any, width: int, places: int, weights: Any) -> Tensor:
        passed.append(places)
        return original(self, rows, width, places, weights) * (1 + fault * (places - 1))

    monkeypatch.setattr(RowGradients, "_pass", spied)
    return passed


def options_in(precision: str) -> TrainingOptions:
    return TrainingOptions.checked(**OPTIONS.model_dump() | {"precision": precision})


def test_a_user_whose_gradient_is_not_finite_counts_as_absent(adapted: Any) -> None:
    """An error, or weights that are not finite, would tell that the user is there."""
    gradients, others = UnitGradients(adapted, BLOCK), texts(3, seed=2)
    without = gradients.clipped_sum(others, CLIP)
    trap = 1234
    embedding = adapted.get_input_embeddings().weight.data
    kept = embedding[trap].clone()
    embedding[trap] = math.inf
    assert trap not in np.concatenate(others)
    with_it = gradients.clipped_sum([*others, np.array([5, trap, 6], np.int32)], CLIP)
    embedding[trap] = kept
    assert torch.equal(with_it, without)


def test_the_noise_has_the_stated_deviation_and_never_repeats() -> None:
    drawn = torch.stack([noised(torch.zeros(2000, dtype=torch.int64), 3.0) for _ in range(20)])
    n = drawn.numel()
    # The probability of 6 standard deviations is below 1e-8.
    assert abs(float(drawn.mean())) < 6 / math.sqrt(n)
    assert abs(float(drawn.var()) - 1) < 6 * math.sqrt(2 / n)
    assert len(drawn.flatten().unique()) == n


def test_the_noise_of_a_training_has_no_seed(tiny: Path) -> None:
    """Two trainings with one seed differ, and an empty corpus is noised too."""

    def weights(units: list[Tokens]) -> Tensor:
        files = train_adapter(
            tiny,
            "tiny",
            units,
            OPTIONS,
            0,
            lambda done: None,
            noise_multiplier=1.5,
            sampling_rate=1.0,
            steps=3,
            clip=2.0,
        )
        named = load(files["adapter_model.safetensors"])
        assert sum("lora_A" in name for name in named) == sum("lora_B" in name for name in named) == 4
        assert all(bool(weight.any()) for weight in named.values())
        return torch.cat([weight.flatten() for weight in named.values()])

    first, second, empty = weights(texts(3, seed=5)), weights(texts(3, seed=5)), weights([])
    assert not torch.equal(first, second)
    assert bool((empty != 0).any())


def test_batches_have_the_stated_rate_and_the_training_the_stated_noise(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches at rate 0.1 follow the binomial law and differ: at rate 1, a stated epsilon of 4 would be 47."""
    units, steps = [np.array([number, number], np.int32) for number in range(200)], 150
    batches: list[list[int]] = []
    given: list[tuple[float, float]] = []

    def spied_sum(self: UnitGradients, batch: list[Tokens], clip: float, report: Any) -> Tensor:
        batches.append([int(unit[0]) for unit in batch])
        given.append((clip, 0.0))
        return torch.zeros(sum(weight.numel() for weight in self.weights), dtype=torch.int64)

    def spied_noise(total: Tensor, multiplier: float) -> Tensor:
        given[-1] = given[-1][0], multiplier
        return total.double()

    monkeypatch.setattr(UnitGradients, "clipped_sum", spied_sum)
    monkeypatch.setattr(per_unit, "noised", spied_noise)
    private = DpSgdOptions(expected_batch=20, population=200, steps=steps, epsilon=4, clip=2.0)
    recipe = dp_sgd._recipe(units, private, OPTIONS)
    recipe.work(tiny, "tiny", report=lambda done: None)
    event = PrivateTraining.model_validate_json(recipe.beside[dp_sgd.RECORD]).event
    assert (event.sampling_rate, event.steps, len(batches)) == (0.1, steps, steps)
    assert set(given) == {(2.0, event.noise_multiplier)}
    sizes = np.array([len(batch) for batch in batches])
    # Six standard deviations of the mean and of the variance of 150 binomial numbers, and of each user's draws.
    assert abs(sizes.mean() - 20) < 6 * math.sqrt(18 / steps)
    assert abs(sizes.var() - 18) < 6 * 18 * math.sqrt(2 / steps)
    drawn = np.bincount(np.concatenate(batches), minlength=200)
    assert np.all(np.abs(drawn - 15) < 7 * math.sqrt(13.5))
    assert len(set(map(tuple, batches))) == steps


def test_a_contribution_is_the_beginning_of_a_users_text(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    written = ("a", "one two three"), ("b", "four"), ("a", "five six"), ("c", "x" * 99)
    documents = [Document(*each) for each in written]
    alone = [contributions([each], tokenizer, 1000)[0] for each in documents]
    assert all(tokens[-1] == tokenizer.eos_token_id for tokens in alone)
    users = contributions(documents, tokenizer, 1000)
    np.testing.assert_array_equal(users[0], np.concatenate([alone[0], alone[2]]))
    np.testing.assert_array_equal(users[1], alone[1])
    capped = contributions(documents, tokenizer, 4)
    assert [len(tokens) for tokens in capped] == [4, 2, 4]
    np.testing.assert_array_equal(capped[0], users[0][:4])


def test_the_event_depends_on_the_options_alone() -> None:
    full = planned(PRIVATE)
    assert (full.sampling_rate, full.steps) == (1.0, 3)
    assert full.run != planned(PRIVATE).run
    batches = planned(DpSgdOptions(expected_batch=4, population=50, steps=25, epsilon=2))
    assert (batches.sampling_rate, batches.steps) == (4 / 50, 25)
    with pytest.raises(InputError, match="epsilon 1e-09 at delta"):
        planned(PRIVATE.model_copy(update={"epsilon": 1e-9, "delta": 1e-12}))
    for given in ({"expected_batch": 4}, {"population": 4}):
        with pytest.raises(InputError, match=r"population: .* give it with expected_batch"):
            DpSgdOptions.checked(**given)


def configured(folder: Path, **privacy: object) -> Configuration:
    return Configuration.of(
        {"ensemble": str(folder), "privacy": privacy, "budget": {"ledger": str(folder / "ledger.db")}}
    )


@pytest.mark.slow
def test_an_ensemble_of_one_is_served_as_trained(tiny: Path, tmp_path: Path) -> None:
    corpus = Corpus(write_corpus(tmp_path / "corpus.jsonl", small_documents()))
    output = tmp_path / "ensemble"
    done = run_training(plan(corpus, output, private=PRIVATE, model=str(tiny), options=OPTIONS))
    manifest = Manifest.load(output)
    manifest.verify(output)
    assert (done.trained, done.manifest) == (1, manifest)
    assert manifest.dp_sgd is not None
    event = manifest.dp_sgd.event
    assert (event.unit, event.sampling_rate, event.steps) == ("user", 1.0, 3)
    assert event.epsilon(1e-5) <= 2
    weights = load_file(output / manifest.parts[0].path / "adapter_model.safetensors")
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
    with pytest.raises(InputError, match="part_kind: DP-SGD trains plain LoRA, with keys and values of its own"):
        run_training(plan(corpus, output, private=PRIVATE, model=str(tiny), options=TrainingOptions()))
    assert [path.name for path in (output / "parts").iterdir()] == [Path(manifest.parts[0].path).name]
    again = run_training(plan(corpus, output, private=PRIVATE, model=str(tiny), options=OPTIONS))
    assert (again.kept, again.manifest) == (1, manifest), "a repeated command neither trains nor charges again"
    other = run_training(
        plan(corpus, output, private=PRIVATE.model_copy(update={"clip": 2.0}), model=str(tiny), options=OPTIONS)
    )
    assert other.manifest.dp_sgd is not None
    assert other.manifest.dp_sgd.event.run != event.run
    assert other.manifest.ensemble == manifest.ensemble


def test_an_ensemble_without_dp_sgd_is_not_served_as_dp_sgd(ensemble: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="trained without privacy"):
        promise(configured(ensemble.directory, protocol="dp-sgd"), ensemble.trained.manifest)


@pytest.mark.slow
def test_the_command_prints_the_guarantee(tiny: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", small_documents())
    arguments = ["train-base", str(corpus), "--output", str(tmp_path / "new"), "--model", str(tiny), "--block", "16"]
    done = privmix(*arguments, "--steps", "2")
    assert done.exit_code == 0, done.output
    assert "(8, 1e-05)-differential privacy for any one user" in done.stdout
    for wrong, field in (("--clip", "0"), ("--epochs", "2"), ("--batch", "2"), ("--expected-batch", "2")):
        told = refused(*arguments, wrong, field)
        assert ("population" if wrong == "--expected-batch" else wrong[2:]) in told
    summary = reported(*arguments, "--steps", "2")
    assert (summary["kept"], summary["dp_sgd"]["event"]["unit"]) == (1, "user")
