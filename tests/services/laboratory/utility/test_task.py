"""Claim: `privmix evaluate task` ranks training sets by what they teach, and reports what they lack and copy."""

import json
import random
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.support.cli import privmix
from tests.tiny import write_tiny_model

WORDS = {
    "knee": ("swollen knee", "leg", "walking hurts", "joint"),
    "flu": ("fever", "cough", "flu shot", "vaccine for winter"),
    "eyes": ("glasses", "reading is hard", "blurred sight", "eye drops"),
}


def lines(count: int, seed: int, wrong: bool = False) -> list[dict[str, str]]:
    """Returns texts of the three classes; `wrong` gives each text the label of the next class."""
    chance, classes = random.Random(seed), list(WORDS)
    rows = []
    for number in range(count):
        label = classes[number % 3]
        words = " and ".join(chance.sample(WORDS[label], 2))
        given = classes[(number + 1) % 3] if wrong else label
        rows.append(
            {"user": f"user-{seed}-{number // 2}", "text": f"Caller {number}: {words}, please.", "label": given}
        )
    return rows


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_tiny_model(folder / "model")
    write(folder / "real.jsonl", lines(120, 0))
    write(folder / "held.jsonl", lines(108, 1))
    write(folder / "good.jsonl", lines(120, 2))
    write(folder / "wrong.jsonl", lines(120, 3, wrong=True))
    write(folder / "lacking.jsonl", [row for row in lines(120, 4) if row["label"] != "eyes"])
    other = {"text": "another", "label": "other"}
    write(folder / "copied.jsonl", [*lines(120, 0)[:30], other, other])
    write(folder / "canaries.jsonl", [{"code": "Caller 7:", "split": "train"}, {"code": "nobody", "split": "heldout"}])
    return folder


def evaluate(folder: Path, *options: str) -> Result:
    words = ["evaluate", "task", "--real", folder / "real.jsonl", "--held-out", folder / "held.jsonl"]
    words += ["--public-model", folder / "model", "--output", folder / "report", "--seeds", "4", *options]
    return privmix(*words)


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    sets = [f"--train={name}={folder / name}.jsonl" for name in ("good", "wrong", "lacking", "copied")]
    done = evaluate(folder, *sets, "--canaries", str(folder / "canaries.jsonl"), "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found == json.loads((folder / "report" / "task-operator.json").read_text())
    return {row["name"]: row for row in found["rows"]} | {"": found}


@pytest.mark.parametrize("classifier", ["logistic regression", "small head"])
def test_a_set_is_worth_what_it_teaches(report: dict[str, Any], classifier: str) -> None:
    scores = {name: report[name]["scores"][classifier] for name in ("real text", "good", "wrong", "lacking")}
    means = {name: score["accuracy"]["mean"] for name, score in scores.items()}
    # The embeddings are of a random model of 16 dimensions; chance is 1/3.
    assert min(means["real text"], means["good"]) > 0.6
    assert means["wrong"] < 0.25
    assert 1 / 3 < means["lacking"] < 2 / 3
    assert scores["lacking"]["macro_f1"]["mean"] < scores["good"]["macro_f1"]["mean"]
    for score in scores.values():
        assert score["accuracy"]["low"] <= score["accuracy"]["mean"] <= score["accuracy"]["high"]


def test_other_sets_are_compared_with_the_first_repetition_by_repetition(report: dict[str, Any]) -> None:
    assert report["real text"]["over_first"] is report["good"]["over_first"] is None
    for classifier, score in report["wrong"]["over_first"].items():
        first, own = (report[name]["scores"][classifier]["accuracies"] for name in ("good", "wrong"))
        differences = [right - wrong for right, wrong in zip(own, first, strict=True)]
        assert score["mean"] == pytest.approx(sum(differences) / 4)
        assert min(differences) <= score["low"] <= score["high"] <= max(differences) < 0


def test_the_report_names_what_a_set_lacks_and_what_is_left_out(report: dict[str, Any]) -> None:
    assert report["lacking"]["missing"] == ["eyes"]
    assert report["copied"]["unknown"] == 2
    assert report["copied"]["texts"] == 30
    assert report[""]["classes"] == ["eyes", "flu", "knee"]
    assert (report[""]["held_out"], report[""]["held_out_users"]) == (108, 54)
    assert report[""]["majority"] == pytest.approx(1 / 3)


def test_copies_and_canaries_are_found(report: dict[str, Any]) -> None:
    # A whole text is copied: 12 tokens or more. Other texts share phrases of two words and their frame.
    assert report["copied"]["copies"]["median"] > report["good"]["copies"]["median"]
    assert report["copied"]["secrets"] == {"found": 1, "planted": 1, "others_found": 0, "others": 1}
    assert report["real text"]["mauve"] > report["wrong"]["mauve"] - 0.5
    assert report["copied"]["mauve"] is None, "30 texts are too few"


def test_copies_and_canaries_are_searched_in_all_texts_though_few_are_embedded(folder: Path) -> None:
    options = [f"--train=copied={folder / 'copied'}.jsonl", "--canaries", str(folder / "canaries.jsonl"), "--most", "3"]
    done = evaluate(folder, *options, "--output", str(folder / "few"), "--json")
    assert done.exit_code == 0, done.output
    real, copied = json.loads(done.stdout)["rows"]
    assert copied["secrets"]["found"] == 1
    assert (real["texts"], copied["texts"]) == (120, 30)
    assert real["mauve"] is None, "three texts are embedded"


class Sources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attributes if name in ("src", "srcset", "href")]


@pytest.mark.usefixtures("report")
def test_the_page_is_self_contained_warns_and_quotes_no_text(folder: Path) -> None:
    page = (folder / "report" / "task-operator.html").read_text()
    parser = Sources()
    parser.feed(page)
    assert len(parser.sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source in parser.sources)
    assert "For the operator only" in page
    assert "lacking</b> has no text of eyes" in page
    assert "Accuracy less that of good" in page
    assert "MAUVE compares 108 texts of each set" in page, "80 of lacking and 30 of copied are too few"
    assert not any(phrase in page for phrases in WORDS.values() for phrase in phrases if " " in phrase)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--label-field", "reason"], "real.jsonl: line 1: has no field 'reason'"),
        (["--train", "a"], "must be NAME=PATH"),
        (["--train", "real text=x"], "name the real text"),
        (["--train", "a=missing.jsonl"], "missing.jsonl: cannot be read"),
        (["--canaries", "missing.jsonl"], "canaries missing.jsonl: cannot be read"),
    ],
)
def test_bad_input_is_named(folder: Path, options: list[str], problem: str) -> None:
    refused = evaluate(folder, *options)
    assert refused.exit_code == 2
    assert problem in refused.output


def test_a_set_without_a_known_label_is_refused(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "other.jsonl", [{"text": "a", "label": "elsewhere"}])
    refused = evaluate(folder, "--train", f"other={path}")
    assert refused.exit_code == 2
    assert "train other: no text has a label of the real text" in refused.output


def test_held_out_text_of_one_class_is_refused(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", [row for row in lines(30, 5) if row["label"] == "flu"])
    refused = evaluate(folder, "--held-out", str(path))
    assert refused.exit_code == 2
    assert "held-out: has only the class 'flu'" in refused.output
