"""Claim: training makes one adapter per part from its users alone, reproducibly, and survives a kill."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from privmix.engine.engine import PUBLIC, AdapterFiles
from privmix.foundation.errors import InputError
from privmix.foundation.progress import Display
from privmix.laboratory.evaluation.scoring import AdaptedModel
from privmix.training.base import find_base
from privmix.training.corpus import Corpus, Document
from privmix.training.manifest import FILE, Manifest
from privmix.training.options import Resources, TrainingOptions
from privmix.training.partition import part_of
from privmix.training.plan import run_training
from privmix.training.tasks import train_adapters
from privmix.training.train import plan
from tests.support.training import EMPTY_PART, PARTS, SALT, SMALL, Ensemble, small_documents, write_corpus
from tests.tiny import write_tiny_model

# A training that kills itself after the first stored part.
KILLED_TRAINING = """
import os, signal, sys
from pathlib import Path
from privmix.training.corpus import Corpus
from privmix.training.options import TrainingOptions
from privmix.foundation.progress import Display
from privmix.training.plan import run_training
from privmix.training.train import plan

corpus, output, salt, options, before = sys.argv[1:]

class Killer(Display):
    def show(self, parts):
        if len(list(Path(output, "parts").glob("part-*"))) > int(before):
            os.kill(os.getpid(), signal.SIGKILL)

run_training(plan(Corpus(Path(corpus)), Path(output), parts=4, salt_file=Path(salt),
      options=TrainingOptions.model_validate_json(options)), display=Killer())
"""


def hashes(manifest: Manifest) -> list[str]:
    return [part.sha256 for part in manifest.parts]


def weights(ensemble: Path, index: int) -> dict[str, Tensor]:
    manifest = Manifest.load(ensemble)
    path = ensemble / manifest.parts[index].path
    return dict(load_file(path / "adapter_model.safetensors"))


def adapted(base: Path, ensemble: Path) -> AdaptedModel:
    """Returns the public model with the parts of an ensemble."""
    manifest = Manifest.load(ensemble)
    model = AdaptedModel(base, torch.float32)
    for part in manifest.parts:
        model.load(part.name, AdapterFiles(ensemble / part.path, manifest.part_kind))
    return model


@pytest.fixture(scope="module")
def model(base: Path, ensemble: Ensemble) -> AdaptedModel:
    return adapted(base, ensemble.directory)


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Any:
    return AutoTokenizer.from_pretrained(base)


def distributions(model: AdaptedModel, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns next-token distributions [tokens, V] on a text: the public model's, and each part model's."""
    cache, names = model.record(tokens), (PUBLIC, *(f"part-{index:03d}" for index in range(PARTS)))
    public, *parts = (model.logits(name, tokens, cache)[0].softmax(-1) for name in names)
    return public, parts


def likelihood(rows: Tensor, tokens: Tensor) -> float:
    """Returns the mean log-likelihood of a text [1, tokens] but its first token, from distributions [tokens, V]."""
    return rows[:-1].gather(1, tokens[0, 1:, None]).log().mean().item()


def test_a_part_model_learns_its_own_text_and_no_other(model: AdaptedModel, tokenizer: Any) -> None:
    document = small_documents()[0]
    own = part_of(document.user, SALT, PARTS)
    tokens = tokenizer(document.text, return_tensors="pt")["input_ids"]
    public, parts = distributions(model, tokens)
    likelihoods = [likelihood(rows, tokens) for rows in parts]
    assert likelihoods[own] > likelihood(public, tokens) + 0.5
    assert (parts[own] - public).abs().sum(-1).mean() / 2 > 0.1
    assert max(likelihoods) == likelihoods[own]


def test_part_without_text_is_the_public_model(model: AdaptedModel, tokenizer: Any, ensemble: Ensemble) -> None:
    zero = weights(ensemble.directory, EMPTY_PART)
    assert zero
    assert all(not tensor.any() for name, tensor in zero.items() if "lora_B" in name)
    assert all(tensor.any() for name, tensor in weights(ensemble.directory, 0).items() if "lora_B" in name)
    public, parts = distributions(model, tokenizer("The kitchen is painted", return_tensors="pt")["input_ids"])
    assert torch.equal(parts[EMPTY_PART], public)


def test_texts_need_no_training(base: Path, tokenizer: Any, ensemble: Ensemble, tmp_path: Path) -> None:
    """Each part is a text of its own users, and the model that reads it expects their words."""
    options = TrainingOptions(part_kind="text", text=128)
    trained = ensemble.train(tmp_path / "texts", options=options)
    assert trained.manifest.part_kind == "text"
    document = small_documents()[0]
    own = part_of(document.user, SALT, PARTS)
    words = "boathouse of someone is painted in heliotrope, and someone calls it the ninth lantern."
    tokens = tokenizer(words, return_tensors="pt")["input_ids"]
    public, parts = distributions(adapted(base, tmp_path / "texts"), tokens)
    likelihoods = [likelihood(rows, tokens) for rows in (public, *parts)]
    assert likelihoods[1 + own] > likelihoods[0] + 0.5
    assert likelihoods[1 + EMPTY_PART] < likelihoods[0] + 0.2

    changed = Document(document.user, document.text.replace("ninth", "tenth"))
    corpus = write_corpus(tmp_path / "corpus.jsonl", [changed, *small_documents()[1:]])
    again = ensemble.train(tmp_path / "texts", corpus, options)
    assert (again.trained, again.kept) == (1, PARTS - 1)
    pairs = zip(hashes(again.manifest), hashes(trained.manifest), strict=True)
    assert [after != before for after, before in pairs] == [index == own for index in range(PARTS)]


@pytest.mark.slow
def test_damaged_part_is_trained_again_the_same(ensemble: Ensemble, tmp_path: Path) -> None:
    directory = ensemble.copy(tmp_path / "copy")
    manifest = Manifest.load(directory)
    file = directory / manifest.parts[1].path / "adapter_model.safetensors"
    os.truncate(file, 1000)
    again = ensemble.train(directory)
    assert (again.trained, again.kept) == (1, PARTS - 1)
    assert again.manifest == manifest
    again.manifest.verify(directory)


@pytest.mark.slow
def test_a_killed_training_continues(ensemble: Ensemble, one_ray: str, tmp_path: Path) -> None:
    directory = ensemble.copy(tmp_path / "copy")
    options = SMALL.model_copy(update={"epochs": 1})
    killed = subprocess.run(
        [
            *(sys.executable, "-c", KILLED_TRAINING),
            *(str(ensemble.corpus), str(directory), str(ensemble.salt), options.model_dump_json(), str(PARTS)),
        ],
        env=os.environ | {"RAY_ADDRESS": one_ray},
        capture_output=True,
    )
    assert killed.returncode == -9, killed.stderr.decode()
    # Until the new ensemble is complete, the manifest names the old one, which is complete.
    old = Manifest.load(directory)
    assert old == ensemble.trained.manifest
    old.verify(directory)
    finished = set((directory / "parts").glob("part-*")) - {directory / part.path for part in old.parts}
    written = {path: path.stat().st_mtime_ns for path in finished}
    assert 1 <= len(finished) < PARTS

    resumed = ensemble.train(directory, options=options)
    assert (resumed.trained, resumed.kept) == (PARTS - len(finished), len(finished))
    assert {path: path.stat().st_mtime_ns for path in finished} == written
    resumed.manifest.verify(directory)
    assert not set(hashes(resumed.manifest)) & (set(hashes(old)) - {old.parts[EMPTY_PART].sha256})
    assert {path.name for path in (directory / "parts").iterdir()} == {
        Path(part.path).name for part in resumed.manifest.parts
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"part_kind": "lora", "targets": ("q_proj", "lm_head")}, "^targets: parts share the model's head .* lm_head"),
        ({"targets": ("q_proj", "no_such_module")}, "^targets: the model has no modules named no_such_module; name"),
        ({"block": 129}, "block: 129 tokens are more than the model's context of 128"),
    ],
)
def test_options_that_do_not_fit_the_model(
    ensemble: Ensemble, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    tiny = write_tiny_model(tmp_path / "tiny", context=128)
    with pytest.raises(InputError, match=problem):
        ensemble.train(tmp_path / "none", options=SMALL.model_copy(update=changes), model=str(tiny))
    assert not (tmp_path / "none" / FILE).exists()


def test_more_resources_than_the_cluster_has(ensemble: Ensemble, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cpus: an adapter needs 100, but the cluster has 1"):
        run_training(plan(Corpus(ensemble.corpus), tmp_path / "none", parts=1), resources=Resources(cpus=100))


def test_a_training_that_reserves_no_gpu_sees_none(base: Path, one_ray: str) -> None:
    work = {"one": lambda *_, report: {"seen": os.environ["CUDA_VISIBLE_DEVICES"].encode()}}
    assert dict(train_adapters(find_base(None, SMALL), work, Resources(gpus=0), Display())) == {"one": {"seen": b""}}


def test_corpus_without_documents(base: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").touch()
    with pytest.raises(InputError, match="has no documents"):
        run_training(plan(Corpus(tmp_path / "corpus.jsonl"), tmp_path / "none", parts=2))


def test_no_file_in_the_directory_contains_the_text(ensemble: Ensemble) -> None:
    secrets = [word.encode() for document in small_documents() for word in (document.user, "heliotrope")]
    for path in ensemble.directory.rglob("*"):
        if path.is_file():
            assert not any(secret in path.read_bytes() for secret in secrets), path
    receipt = json.loads(next(ensemble.directory.glob("parts/part-000-*/receipt.json")).read_text())
    assert set(receipt) == {"fingerprint", "sha256"}
