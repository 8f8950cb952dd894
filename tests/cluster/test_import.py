"""Claim: adapters that PEFT trained elsewhere are imported and served, and what is not known of them is said."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from privmix.budget.sentence import IMPORTED, promise_sentence
from privmix.engine.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from privmix.foundation.errors import ManifestError
from privmix.privacy.protocols.public import PublicSettings
from privmix.training import imported
from privmix.training.manifest import Manifest, hash_adapter
from privmix.training.options import PLAIN_TARGETS
from privmix_cluster.configuration import Configuration
from privmix_cluster.promise import promise
from tests.ensembles import write_adapters
from tests.inline import run_inline
from tests.running import configure, running
from tests.support.cli import privmix, refused
from tests.tiny import write_served_model

NAMES = ("one", "two", "three")
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def saved(tiny: Path, tmp_path: Path) -> dict[str, Path]:
    return write_adapters(tmp_path / "saved", NAMES, tiny, targets=PLAIN_TARGETS)


def edit(path: Path, **changed: Any) -> None:
    file = path / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changed))


def reweigh(path: Path, name: str, weights: torch.Tensor) -> None:
    file = path / WEIGHTS_FILE
    save_file({**load_file(file), name: weights}, file)


def test_the_guarantee_of_imported_parts_says_what_nothing_has_checked(saved: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "ensemble"
    assert IMPORTED in privmix("import", *saved.values(), "--output", output).output
    manifest = Manifest.load(output)
    manifest.verify(output)
    assert [part.sha256 for part in manifest.parts] == [hash_adapter(path) for path in saved.values()]
    reweigh(saved["two"], FIRST, torch.ones(4, 16))
    manifest.verify(output)  # its files are copies
    edit(output / manifest.parts[1].path, r=2)
    with pytest.raises(ManifestError, match=r"part-001: .* is not the one in the manifest; import it again"):
        manifest.verify(output)
    promised = promise(Configuration.load(configure(tmp_path, output)), manifest)
    assert promised.sentence.count(IMPORTED) == 1
    assert IMPORTED not in promise_sentence(promised.terms, PublicSettings().plan(3).guarantee, None)


def test_other_adapters_are_another_partition(saved: dict[str, Path], tmp_path: Path) -> None:
    """Under it a user could have another part's account. The ensemble stays the same, so its costs add up."""
    output, manifests = tmp_path / "ensemble", []
    for names in (NAMES, NAMES[:2], NAMES[::-1]):
        assert privmix("import", *(saved[name] for name in names), "--output", output).exit_code == 0
        manifests.append(Manifest.load(output))
        assert len([*(output / "parts").iterdir()]) == len(names)
    assert len({manifest.ensemble for manifest in manifests}) == 1
    assert len({manifest.partition for manifest in manifests}) == 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: (path / WEIGHTS_FILE).unlink(), "has no adapter_model.safetensors"),
        (lambda path: (path / CONFIG_FILE).write_text("["), "adapter_config.json: Invalid JSON"),
        (lambda path: (path / WEIGHTS_FILE).write_bytes(b"12"), "its weights are damaged"),
        (lambda path: edit(path, peft_type="IA3"), "peft_type: Input should be 'LORA'"),
        (lambda path: edit(path, revision="v2"), "say with --model what all were trained on"),
        (lambda path: edit(path, target_modules=["nothing"]), "the model has no modules named nothing"),
        (lambda path: edit(path, alpha_pattern={"(": 1}), "PEFT cannot make it on"),
        (lambda path: edit(path, base_model_name_or_path="other"), "say with --model what all were trained on"),
        (lambda path: edit(path, r=8), "is not what PEFT makes on"),
        (
            lambda path: reweigh(path, "embed_tokens.weight", torch.zeros(2)),
            "embed_tokens.weight is not what PEFT makes",
        ),
        (lambda path: reweigh(path, FIRST, torch.full((4, 16), torch.nan)), "its weights are not finite"),
        (lambda path: reweigh(path, FIRST, torch.ones((4, 16), dtype=torch.int8)), "are not finite numbers"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "its tokenizer is damaged"),
        (lambda path: shutil.copytree(path.parent / "one", path, dirs_exist_ok=True), "have the same weights"),
    ],
)
def test_an_adapter_that_would_run_differently_is_refused(
    saved: dict[str, Path], tmp_path: Path, change: Callable[[Path], object], problem: str
) -> None:
    change(saved["two"])
    assert problem in refused("import", *saved.values(), "--output", tmp_path / "ensemble")
    assert not (tmp_path / "ensemble").exists()


def test_an_adapter_that_changes_after_it_was_checked_is_refused(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imported, "_check_vocabularies", lambda *_: reweigh(saved["two"], FIRST, torch.ones(4, 16)))
    told = refused("import", *saved.values(), "--output", tmp_path / "ensemble")
    assert "two: was changed meanwhile; import it again" in told


def test_another_vocabulary_is_refused(saved: dict[str, Path], tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for added, status in ((), 0), (("<new>",), 2):
        tokenizer.add_tokens([*added])
        tokenizer.save_pretrained(saved["two"])
        result = privmix("import", *saved.values(), "--output", tmp_path / "ensemble")
        assert result.exit_code == status
    assert "two: its tokenizer has other tokens" in result.output


def test_an_ensemble_that_was_trained_is_not_replaced(saved: dict[str, Path], ensemble: Path, tmp_path: Path) -> None:
    output = shutil.copytree(ensemble, tmp_path / "trained")
    told = refused("import", *saved.values(), "--output", output)
    assert "has an ensemble that was trained there" in told


def test_an_evaluation_says_what_the_guarantee_of_imported_parts_assumes(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_inline(monkeypatch)
    privmix("import", *saved.values(), "--output", tmp_path / "ensemble")
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps({"user": "somebody", "text": "The ferry leaves at nine. " * 20}) + "\n")
    words = ["evaluate", held_out, "--ensemble", tmp_path / "ensemble", "--output", tmp_path / "report"]
    words += ["--tokens", "24", "--runs", "2", "--protocol", "pmixed"]
    assert IMPORTED in privmix(*words).output
    (table,) = json.loads((tmp_path / "report" / "evaluation.json").read_bytes())["tables"]
    for each in table["results"]:
        assert (IMPORTED in each["sentence"]) == (each["protocol"] == "pmixed")


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [{"protocol": "pmixed", "q": 0.5}, {"protocol": "adapmixed"}])
def test_imported_adapters_are_served_by_several_shards(tmp_path: Path, privacy: dict[str, Any]) -> None:
    model = write_served_model(tmp_path / "model", 256)
    saved = write_adapters(tmp_path / "saved", NAMES, model, targets=PLAIN_TARGETS)
    output = tmp_path / "ensemble"
    privmix("import", *saved.values(), "--output", output)
    config = configure(
        tmp_path,
        output,
        privacy={**privacy, "tokens": 1000},
        http={"max_tokens": 64},
        engine={"context_length": 256, "cache_gib": 1},
        shards={"parts_per_shard": 2, "num_cpus": 0, "threads": 1},
    )
    with running(config) as service:
        body = {"model": "privmix", "prompt": "One day", "max_tokens": 24, "n": 2}
        answer = httpx.post(f"{service.base_url}/v1/completions", json=body, timeout=120).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 48
        assert IMPORTED in service.privacy()["guarantee"]
        assert service.privacy()["tokens_charged"] >= 48
    assert "plain LoRA: for a token a shard makes a pass" in config.with_suffix(".log").read_text()
