"""Claim: `privmix evaluate` reports on real ensembles, continues an interrupted run, and refuses unfit ensembles."""

import json
import re
import shutil
from pathlib import Path

import pytest

from privmix.training.manifest import Manifest
from tests.ensembles import write_ensemble
from tests.inline import run_inline
from tests.support.cli import privmix, refused, reported

# With this salt, one of the three users is held out.
SALT = bytes(range(32))
DOCUMENTS = [
    {"user": f"user-{number % 3}", "text": f"The ferry to island {number} leaves at nine, and waits for nobody at all."}
    for number in range(9)
]
SMALL = ["--tokens", "24", "--runs", "2", "--epsilon", "8", "--precision", "float32"]


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("held-out") / "heldout.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in DOCUMENTS))
    return path


def evaluation(held_out: Path, ensemble: Path, output: Path, *options: object) -> list[object]:
    return ["evaluate", held_out, "--ensemble", ensemble, "--output", output, *SMALL, *options]


def test_ensembles_of_one_name_are_refused(held_out: Path, ensemble: Path, tmp_path: Path) -> None:
    other = shutil.copytree(ensemble, tmp_path / ensemble.name)
    told = refused(*evaluation(held_out, ensemble, tmp_path / "report", "--ensemble", other))
    assert f"ensemble: {ensemble} and {other} have one name" in told
    assert not (tmp_path / "report").exists()


@pytest.mark.slow
def test_a_report_of_real_ensembles(held_out: Path, ensemble: Path, tmp_path: Path) -> None:
    single = write_ensemble(tmp_path / "one", 1)
    words = evaluation(held_out, ensemble, tmp_path / "report", "--finetuned", single)
    found = reported(*words)
    assert found == json.loads((tmp_path / "report" / "evaluation.json").read_text())
    by_label = {each["label"]: each for each in found["tables"][0]["results"]}
    assert list(by_label)[:3] == ["Public model", "Fine-tuned, not private", "Ensemble, not private"]
    assert "SubMix" not in by_label, "this ensemble has no halves"
    assert by_label["PMixed, clip"]["status"] == "certified"
    assert 7.9 < by_label["PMixed, clip"]["reached"]["bound"] <= 8, "by exact composition"
    assert by_label["Ensemble, not private"]["asked"] == len(Manifest.load(ensemble).parts)
    # The single model's adapter is the ensemble's first.
    assert by_label["One part, not private"]["perplexity"] == by_label["Fine-tuned, not private"]["perplexity"]

    rows = {path: path.stat().st_mtime_ns for path in (tmp_path / "report" / "rows").glob("*.npy")}
    # The single part's adapter equals the ensemble's first, and each adapter is evaluated once.
    assert len(rows) == 1 + len(Manifest.load(ensemble).parts)
    lost = min(rows)
    lost.write_bytes(lost.read_bytes()[:-2])
    again = privmix(*words)
    assert again.exit_code == 0, again.output
    assert "evaluating 1 models" in again.stderr
    assert "protocols" not in again.stderr, "outcomes are kept"
    assert "PMixed, clip" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in rows if path != lost} == {
        path: time for path, time in rows.items() if path != lost
    }


@pytest.mark.slow
def test_submix_is_evaluated_on_every_ensemble_with_halves(
    held_out: Path, ensemble: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_inline(monkeypatch)
    smaller = [write_ensemble(tmp_path / f"parts-{parts}", parts, halves=True) for parts in (2, 3)]
    given = [option for each in smaller for option in ("--ensemble", each)]
    found = reported(*evaluation(held_out, ensemble, tmp_path / "report", *given, "--protocol", "submix"))
    results = [each for each in found["tables"][0]["results"] if each["label"] == "SubMix"]
    assert [each["parts"] for each in results] == [3, 2]
    assert all(each["losses"]["screened"] is None and each["losses"]["quarters"][-1] > 0 for each in results)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--tokens", "0"], "tokens: "),
        (["--epsilon", "-1"], "epsilon: "),
        (["--sweep", "colour=red"], "colour: no protocol here has such a field; they have .*radius"),
        (["--set", "q=7"], "q: pmixed does not take"),
        (["--precision", "int8"], "precision: "),
        (["--finetuned", "ENSEMBLE"], "finetuned .*: has 4 parts; give an ensemble of one part"),
        (["--dp-sgd", "/nowhere"], "has no manifest.json"),
    ],
)
def test_impossible_options_are_named(
    held_out: Path, ensemble: Path, tmp_path: Path, options: list[str], problem: str
) -> None:
    given = [str(ensemble) if option == "ENSEMBLE" else option for option in options]
    told = refused(*evaluation(held_out, ensemble, tmp_path / "report", *given))
    assert told.startswith("privmix evaluate: ")
    assert re.search(problem, told)


@pytest.mark.parametrize("field", ["base_revision", "tokenizer"])
def test_ensembles_of_another_model_are_refused(held_out: Path, ensemble: Path, tmp_path: Path, field: str) -> None:
    other = Path(shutil.copytree(ensemble, tmp_path / "other"))
    Manifest.load(other).model_copy(update={field: "0" * 64}).save(other)
    told = refused(*evaluation(held_out, ensemble, tmp_path / "report", "--ensemble", other))
    label = "tokenizer" if field == "tokenizer" else "public model"
    assert f"ensemble {other}: its {label} (000000000000) differs from that of" in told
