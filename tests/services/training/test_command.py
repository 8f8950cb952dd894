"""Claim: `privmix train` trains an ensemble, reports one JSON object, and names bad options and lines."""

from pathlib import Path

import pytest

from privmix.budget.receipt import Receipt
from privmix.training.manifest import Manifest
from tests.inline import run_inline
from tests.support.cli import privmix, refused, reported
from tests.support.training import PARTS, SMALL, Ensemble, small_documents, write_corpus
from tests.tiny import write_tiny_model


def flags(ensemble: Ensemble, output: Path) -> list[str]:
    numbers = SMALL.model_dump(exclude_unset=True)
    chosen = [word for name, value in numbers.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["--output", str(output), "--parts", str(PARTS), "--salt-file", str(ensemble.salt), *chosen]


def test_the_command_trains_and_prints_one_json_object(ensemble: Ensemble, tmp_path: Path) -> None:
    directory = ensemble.copy(tmp_path / "copy")
    bad = tmp_path / "corpus.jsonl"
    bad.write_bytes(ensemble.corpus.read_bytes() + b"heliotrope\n")
    summary = reported("train", bad, *flags(ensemble, directory), "--skip-bad")
    assert summary.pop("seconds") >= 0
    assert summary == {
        "ensemble": ensemble.trained.manifest.ensemble,
        "output": str(directory),
        "parts": PARTS,
        "adapters": PARTS,
        "trained": 0,
        "kept": PARTS,
        "skipped": 1,
        "skipped_by_kind": {"is not JSON": 1},
    }


def test_without_a_number_of_parts_an_ensemble_keeps_its_own(ensemble: Ensemble, tmp_path: Path) -> None:
    directory = ensemble.copy(tmp_path / "copy")
    words = flags(ensemble, directory)
    del words[words.index("--parts") : words.index("--parts") + 2]
    assert reported("train", ensemble.corpus, *words)["kept"] == PARTS


def test_the_number_of_parts_is_never_taken_from_the_corpus(tmp_path: Path) -> None:
    """It is public: the 96th user of a corpus changed it from 8 to 12, and everyone saw that without a token spent."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", small_documents())
    told = refused("train", corpus, "--output", tmp_path / "new")
    assert "--parts: is missing; `privmix plan --users` proposes it" in told


@pytest.mark.slow
def test_another_number_of_parts_is_told_if_there_is_a_ledger(ensemble: Ensemble, tmp_path: Path) -> None:
    directory = ensemble.copy(tmp_path / "copy")
    words = ["train", str(ensemble.corpus), "--output", str(directory), "--salt-file", str(ensemble.salt)]
    changed, same = (["--part-kind", "text", "--parts", str(number)] for number in (PARTS + 1, PARTS))
    assert "and a ledger" not in privmix(*words, *changed).stderr
    ensemble.trained.manifest.save(directory)
    Receipt(ledger="of this ensemble").save(directory)
    assert "and a ledger" not in privmix(*words, *same).stderr
    told = privmix(*words, *changed)
    assert f"has {PARTS} parts and a ledger" in told.stderr
    assert len(Manifest.load(directory).parts) == PARTS + 1


def test_trains_halves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_inline(monkeypatch)
    corpus, model = write_corpus(tmp_path / "corpus.jsonl", small_documents()), write_tiny_model(tmp_path / "tiny")
    arguments = ["train", str(corpus), "--output", str(tmp_path / "new"), "--parts", "2", "--halves"]
    arguments += ["--model", str(model), "--block", "32", "--epochs", "1", "--precision", "float32"]
    summary = reported(*arguments)
    assert (summary["parts"], summary["adapters"], summary["trained"], summary["kept"]) == (2, 6, 6, 0)
    manifest = Manifest.load(tmp_path / "new")
    assert len(manifest.adapters) == 6
    done = privmix(*arguments)
    assert "2 parts, 6 adapters, 0 of them trained and 6 kept" in done.stdout
    assert Manifest.load(tmp_path / "new") == manifest


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rank", "0"], "rank"),
        (["--precision", "int8"], "precision"),
        (["--parts", "0"], "parts: must be at least 1"),
        (["--parts", "2", "--model", "/no/such/model"], "no such directory"),
        (["--targets", ","], "targets"),
        (["--part-kind", "shared"], "part_kind: Input should be 'reader', 'lora' or 'text'"),
        (["--part-kind", "text", "--text", "100"], "text: Input should be"),
        (["--part-kind", "text", "--rank", "8"], "has no effect with --part-kind text"),
        (["--text", "256"], "has an effect only with --part-kind text"),
        (["--part-kind", "lora", "--layers", "2"], "has an effect only with --part-kind reader"),
        (["--base-share", "0.5"], "belongs to --base auto"),
    ],
)
def test_impossible_option_is_named(ensemble: Ensemble, tmp_path: Path, arguments: list[str], problem: str) -> None:
    assert problem in refused("train", ensemble.corpus, "--output", tmp_path / "none", *arguments)
