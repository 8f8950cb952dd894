"""Claim: labelled texts are read from files and from jobs, and bad input is named without its content."""

import json
from pathlib import Path
from typing import Any

import pytest

from privmix.foundation.errors import InputError
from privmix.laboratory.utility.labelled import TextOrigin, parse_named, read
from tests.services.generation.small_service import SmallService, serving
from tests.support.jobs import TOKENS, request, run

CARD = {
    "protocol": {"kind": "exponential-fixed-size", "parts": 8},
    "epsilon": 8.0,
    "delta": 1e-5,
    "budget": {"tokens_delivered": 100, "tokens_free": 60},
}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_job(directory: Path, rows: list[dict[str, Any]], schema: dict[str, Any] | None = None) -> Path:
    directory.mkdir()
    write_lines(directory / "synthetic.jsonl", rows)
    (directory / "job.json").write_text(json.dumps({} if schema is None else {"schema": schema}))
    (directory / "card.json").write_text(json.dumps(CARD))
    return directory


def test_a_file_has_texts_labels_and_users(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"user": "u", "call": "a knee", "reason": "knee"},
        {"call": " ", "reason": "x"},
        {"call": "b", "reason": 3},
    ]
    read_set = read("real", write_lines(tmp_path / "real.jsonl", rows), "call", "reason")
    assert (read_set.texts, read_set.labels, read_set.users) == (("a knee", "b"), ("knee", "3"), ("u", "3"))
    assert (read_set.dropped, read_set.origin) == (1, TextOrigin())
    assert read_set.only(frozenset({"3"})).texts == ("b",)


def test_a_sample_is_the_same_every_time_and_keeps_the_order(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": f"text {number}", "label": number} for number in range(100)]
    whole = read("real", write_lines(tmp_path / "real.jsonl", rows), "text", "label")
    sample = whole.sample(40)
    assert (len(sample), sample) == (40, whole.sample(40))
    numbers = [int(label) for label in sample.labels]
    assert numbers == sorted(numbers) != list(range(40))
    assert [f"text {number}" for number in numbers] == list(sample.texts)
    assert whole.sample(100) is whole


def test_a_job_has_its_cards_guarantee_and_the_label_of_its_template(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", [{"id": 0, "label": "knee", "text": "it hurts"}])
    for path in (job, job / "synthetic.jsonl"):
        read_set = read("private", path, "text", "reason")
        assert (read_set.texts, read_set.labels) == (("it hurts",), ("knee",))
        assert read_set.origin == TextOrigin("exponential-fixed-size", 8.0, 1e-5, 100, 40)


def test_records_of_a_schema_are_read_and_cut_ones_are_counted(tmp_path: Path) -> None:
    rows = [{"text": '{"reason": "knee", "call": "it hurts"}'}, {"text": '{"reason": "kn'}]
    read_set = read("private", write_job(tmp_path / "job", rows, {"type": "object"}), "call", "reason")
    assert (read_set.texts, read_set.labels, read_set.dropped) == (("it hurts",), ("knee",), 1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"text": "heliotrope", "label": "a"}\n{"text": "heliotrope"}\n', "line 2: has no field 'label'"),
        ('{"label": "a"}\n', "line 1: has no field 'text'"),
        ('{"text": ["heliotrope"], "label": "a"}\n', "line 1: text: must be text"),
        ('{"text": "heliotrope", "label": ["a"]}\n', "line 1: label: must be text, a whole number"),
        ("\nheliotrope\n", "line 2: is not JSON"),
        ('["heliotrope"]\n', "line 1: must be an object"),
        ('{"text": " ", "label": "a"}\n', "has no labelled text"),
        ("", "has no labelled text"),
    ],
)
def test_a_bad_line_is_named_without_its_content(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=problem) as refused:
        read("bad", path, "text", "label")
    assert "heliotrope" not in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_missing_file_and_a_job_without_a_card_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read("real", tmp_path / "none.jsonl", "text", "label")
    job = write_job(tmp_path / "job", [{"label": "knee", "text": "it hurts"}])
    (job / "card.json").unlink()
    with pytest.raises(InputError, match=r"has no card\.json"):
        read("private", job, "text", "label")


def test_training_sets_are_named() -> None:
    assert parse_named(["a=x.jsonl", "b = c=d"]) == {"a": Path("x.jsonl"), "b": Path(" c=d")}
    for words, problem in (
        (["a"], "must be NAME=PATH"),
        (["=x"], "must be NAME=PATH"),
        (["a=1", "a=2"], "given twice"),
    ):
        with pytest.raises(InputError, match=problem):
            parse_named(words)


def test_a_job_that_was_run_has_the_guarantee_of_its_service(tmp_path: Path) -> None:
    with serving(SmallService()) as service:
        run(tmp_path, service.url, request(2))
    read_set = read("private", tmp_path, "text", "reason")
    assert (len(read_set), read_set.classes) == (2, frozenset({"urgent"}))
    assert read_set.origin == TextOrigin("small", 8.0, 1e-5, 2 * TOKENS, 2 * TOKENS)
