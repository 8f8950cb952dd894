"""Claim: a corpus reads every valid document, and reports a bad line by its number without a quotation."""

import json
import tracemalloc
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from services.errors import CorpusError
from services.training.corpus import LINE_LIMIT, Corpus, Document

SECRET = "heliotrope"
GOOD = b'{"user": "ann", "text": "hello"}\n'


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


BAD_LINES = {
    "not UTF-8": (b'{"user": "ann", "text": "heliotrope \xff"}', "is not UTF-8"),
    "not JSON": (b"heliotrope", "is not JSON"),
    "cut off": (b'{"user": "ann", "text": "heliotrope', "is not JSON"),
    "nested too deeply": (b"[" * 200_000, "is not JSON"),
    "blank": (b"", "is not JSON"),
    "not an object": (b'["heliotrope"]', "is not a JSON object"),
    "no user": (b'{"text": "heliotrope"}', "field 'user': names no user"),
    "null user": (b'{"user": null, "text": "heliotrope"}', "field 'user': names no user"),
    "blank user": (b'{"user": " ", "text": "heliotrope"}', "field 'user': is blank"),
    "user is a list": (b'{"user": ["heliotrope"], "text": "x"}', "field 'user': is neither text nor a whole number"),
    "user is a truth value": (b'{"user": true, "text": "x"}', "field 'user': is neither text nor a whole number"),
    "no text": (b'{"user": "heliotrope"}', "field 'text': is missing"),
    "empty text": (b'{"user": "heliotrope", "text": " \\n"}', "field 'text': is empty"),
    "text is a number": (b'{"user": "heliotrope", "text": 7}', "field 'text': is not text"),
    "half a surrogate pair": (b'{"user": "heliotrope", "text": "\\ud800"}', "field 'text': has half of a surrogate"),
    "too long": (b'{"user": "ann", "text": "' + b"heliotrope" * (LINE_LIMIT // 10) + b'"}', "is longer than 1 MiB"),
}


@pytest.mark.parametrize(("line", "problem"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_and_not_quoted(tmp_path: Path, line: bytes, problem: str) -> None:
    path = write(tmp_path / "corpus.jsonl", GOOD, GOOD, line + b"\n", GOOD)
    with pytest.raises(CorpusError) as error:
        list(Corpus(path))
    assert str(error.value).startswith(f"{path}, line 3")
    assert problem in str(error.value)
    assert SECRET not in str(error.value)
    # The traceback must not quote the line either.
    assert error.value.__suppress_context__


def test_bad_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", *(GOOD + line + b"\n" for line, _ in BAD_LINES.values()))
    corpus = Corpus(path, skip_bad=True)
    for _ in range(2):
        assert list(corpus) == [Document("ann", "hello")] * len(BAD_LINES)
        assert corpus.skipped == len(BAD_LINES)


def test_a_line_far_over_the_limit_is_never_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    with path.open("wb") as file:
        file.write(GOOD)
        for _ in range(50):
            file.write(b"x" * 2**20)
        file.write(b"\n" + GOOD)
    corpus = Corpus(path, skip_bad=True)
    tracemalloc.start()
    try:
        documents = list(corpus)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(documents), corpus.skipped) == (2, 1)
    assert peak < 8 * 2**20


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=8))
def test_any_bytes_are_read_or_counted(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = write(tmp_path_factory.mktemp("any") / "corpus.jsonl", *(line + b"\n" for line in lines))
    corpus = Corpus(path, skip_bad=True)
    assert len(list(corpus)) + corpus.skipped == len(lines)


def test_fields_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", b'{"patient": "ann", "note": "hello"}')
    assert list(Corpus(path, user_field="patient", text_field="note")) == [Document("ann", "hello")]


def test_different_spellings_of_an_id_are_one_user(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", b'{"user": 7, "text": "a"}\n{"user": " 7 ", "text": "b"}')
    assert {document.user for document in Corpus(path)} == {"7"}


def test_byte_order_mark_and_carriage_returns_are_accepted(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"), GOOD)
    assert len(list(Corpus(path))) == 2


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no such file"):
        Corpus(tmp_path / "none.jsonl")


def test_dataset_directory(tmp_path: Path) -> None:
    rows = {"user": ["ann", "bob", "cy"], "text": ["hello", None, SECRET], "other": [1, 2, 3]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "data")
    corpus = Corpus(tmp_path / "data", skip_bad=True)
    assert list(corpus) == [Document("ann", "hello"), Document("cy", SECRET)]
    with pytest.raises(CorpusError, match="row 2, field 'text': is missing"):
        list(Corpus(tmp_path / "data"))


def test_dataset_without_the_column(tmp_path: Path) -> None:
    Dataset.from_dict({"user": ["ann"], "note": [SECRET]}).save_to_disk(tmp_path / "data")
    with pytest.raises(CorpusError, match="no column 'text', only user, note"):
        list(Corpus(tmp_path / "data"))


def test_dataset_with_splits(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"user": ["ann"], "text": ["hello"]})
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "data")
    with pytest.raises(CorpusError, match=r"several splits.*data/train"):
        list(Corpus(tmp_path / "data"))
    assert len(list(Corpus(tmp_path / "data" / "train"))) == 1


def test_directory_that_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({}))
    with pytest.raises(CorpusError, match="not of a Hugging Face dataset"):
        list(Corpus(tmp_path))
