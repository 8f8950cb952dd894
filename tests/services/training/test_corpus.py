"""Claim: a corpus reads every valid document, and reports a bad line by its number without a quotation."""

import csv
import gzip
import io
import json
import re
import tracemalloc
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from privmix.foundation.errors import CorpusError, InputError
from privmix.foundation.json_lines import LINE_LIMIT
from privmix.training.corpus import Corpus, Document

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
    "not an object": (b'["heliotrope"]', "is not a JSON object"),
    "no user": (b'{"text": "heliotrope"}', "field 'user': names no user"),
    "a key twice": (b'{"user": "ann", "user": "bob", "text": "heliotrope"}', "has a key twice"),
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
        assert corpus.skipped.total() == len(BAD_LINES)
        assert corpus.skipped["is not JSON"] == 3
        assert corpus.skipped["field 'text': is empty"] == 1


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
    assert (len(documents), corpus.skipped.total()) == (2, 1)
    assert peak < 8 * 2**20


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=8))
def test_any_bytes_are_read_or_counted(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = write(tmp_path_factory.mktemp("any") / "corpus.jsonl", GOOD, *(line + b"\n" for line in lines))
    corpus = Corpus(path, skip_bad=True)
    blank = sum(not line.replace(b"\xef\xbb\xbf", b"").strip(b" \t\r") for line in lines)
    assert len(list(corpus)) + corpus.skipped.total() == 1 + len(lines) - blank


@pytest.mark.parametrize("given", ["s3://bucket/notes.jsonl", Path("s3://bucket/notes.jsonl")])
def test_a_url_is_named_as_one(given: Path | str) -> None:
    with pytest.raises(CorpusError, match=r"corpus s3://bucket/notes\.jsonl: is a URL; download it"):
        Corpus(given)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"is a directory; name its files.*to_parquet"):
        Corpus(tmp_path)


ROWS: list[dict[str, Any]] = [
    {"ID": 0, "section": "GENHX", "dialogue": 'Doctor: Hello, "Ann".\r\nPatient: Hi; it hurts.'},
    {"ID": 1, "section": "CC", "dialogue": "Doctor: どうしましたか\nPatient: Nothing, really."},
    {"ID": 0, "section": "ROS", "dialogue": "Doctor: And now?"},
]
EXPECTED = [Document(str(row["ID"]), row["dialogue"]) for row in ROWS]


def csv_of(delimiter: str) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue() + "\r\n"


def parquet_of(rows: Sequence[dict[str, Any]], **options: Any) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(list(rows)), buffer, **options)
    return buffer.getvalue()


JSONL = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
CONTENTS = {
    "JSON Lines with blank lines": JSONL.encode(),
    "JSON Lines with a byte order mark": b"\xef\xbb\xbf" + JSONL.replace("\n", "\r\n").encode(),
    "JSON Lines in UTF-16": JSONL.encode("utf-16"),
    "JSON Lines in UTF-16, big-endian": b"\xfe\xff" + JSONL.encode("utf-16-be"),
    "CSV": csv_of(",").encode(),
    "CSV with a byte order mark": csv_of(",").encode("utf-8-sig"),
    "CSV with semicolons": csv_of(";").encode(),
    "tab-separated": csv_of("\t").encode(),
    "CSV in UTF-16": csv_of(",").encode("utf-16"),
    "Parquet": parquet_of(ROWS),
    "Parquet in groups of one row": parquet_of(ROWS, row_group_size=1, compression="zstd"),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("name", ["notes", "notes.jsonl"])
def test_a_file_is_read_by_its_content(tmp_path: Path, content: bytes, name: str) -> None:
    assert list(Corpus(write(tmp_path / name, content), "ID", "dialogue")) == EXPECTED


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("notes.csv", csv_of(","))
    return file.getvalue()


def arrow() -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_file(file, pa.schema([("ID", pa.int64())])):
        pass
    return file.getvalue()


OTHER_KINDS = {
    "ZIP": (zipped(), "neither JSON Lines, CSV nor Parquet"),
    "Arrow": (arrow(), "neither JSON Lines, CSV nor Parquet"),
    "SQLite": (b"SQLite format 3\0" + bytes(84), "neither JSON Lines, CSV nor Parquet"),
    "PDF": (b"%PDF-1.7\n%\xe2\xe3", "neither JSON Lines nor CSV"),
    "gzip": (gzip.compress(JSONL.encode(), mtime=0), "Decompress or convert it"),
    "an array": (json.dumps(ROWS).encode(), "one JSON array"),
    "UTF-16 without a mark": (JSONL.encode("utf-16-le"), "UTF-16 without a byte order mark"),
    "text": (b"Doctor heliotrope said hello.\n", "neither JSON Lines nor CSV"),
    "CSV without names": (b"7,heliotrope\n8,heliotrope\n", "names no columns ID, dialogue"),
    "names in another case": (b"Id, Dialogue,heliotrope\n", "no columns ID, dialogue, but 'Id', ' Dialogue'"),
    "carriage returns alone": (b"ID,dialogue\r7,heliotrope\r8,heliotrope\r", "ends its lines with carriage returns"),
    "JSON Lines with carriage returns alone": (JSONL.replace("\n", "\r").encode(), "ends its lines with carriage"),
    "a long first line": (b"heliotrope " * 20_000 + b"\n", "neither JSON Lines nor CSV"),
    "a wanted column twice": (b"ID,dialogue,ID\n7,heliotrope,8\n", "two columns have the name 'ID'"),
    "damaged Parquet": (b"PAR1 heliotrope", "damaged or incomplete Parquet"),
    "quote that is not closed": (b'ID,dialogue\n7,"heliotrope\n8,x\n', "has a quote that is not closed"),
    "quote that takes another row": (b'ID,dialogue\n7,"helio\n8,"trope\n9,x\n', "has a quote that is not closed"),
    "row that a quote made of two": (b'ID,dialogue\n7,a,"helio\n8,trope"\n9,x\n', "A quote in it may have taken rows"),
}


@pytest.mark.parametrize("taken", [["u2,my text", 'u3,a board of 5"'], ['u3,a board of 5"'], ["u 2,x y", "u2,x", 'y"']])
def test_a_quote_takes_no_rows_of_others_where_the_writer_quotes_nothing(tmp_path: Path, taken: list[str]) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("\n".join(["user,text", "u1,hello", 'mallory,"so it goes', *taken, "u4,last"]))
    with pytest.raises(CorpusError, match="line 3: a line of a quoted text is a whole row by itself"):
        list(Corpus(path, skip_bad=True))


def test_prose_with_commas_on_several_lines_is_a_text(tmp_path: Path) -> None:
    texts = ["Hello, Ann.\nIt costs 10,000 dollars\n\nyes, and 5\n", "one\ntwo,", 'a "b"\nc, d']
    with (tmp_path / "notes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("user", "text"), *((f"u{index}", text) for index, text in enumerate(texts))])
    assert [document.text for document in Corpus(tmp_path / "notes.csv")] == texts


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(("content", "problem"), OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_a_file_that_cannot_be_read_whole_is_refused_and_never_skipped(
    tmp_path: Path, content: bytes, problem: str, skip_bad: bool
) -> None:
    path = write(tmp_path / "notes", content)
    with pytest.raises(CorpusError, match=re.escape(problem)) as error:
        list(Corpus(path, "ID", "dialogue", skip_bad))
    assert str(path) in str(error.value)
    assert SECRET not in str(error.value)


def test_a_bad_row_of_csv_is_one_row(tmp_path: Path) -> None:
    path = write(
        tmp_path / "notes.csv",
        b"user,text\nann,hello\nbob,he,liotrope\n\ncy,\xff\ndan,\neve,bye\nfay,",
        b"x" * (LINE_LIMIT + 1),
    )
    with pytest.raises(CorpusError, match="line 3: has more or fewer cells"):
        list(Corpus(path))
    corpus = Corpus(path, skip_bad=True)
    assert list(corpus) == [Document("ann", "hello"), Document("eve", "bye")]
    assert dict(corpus.skipped) == {
        "has more or fewer cells than the first line": 1,
        "field 'text': is not UTF-8": 1,
        "field 'text': is empty": 1,
        "field 'text': is longer than 1 MiB": 1,
    }


def test_columns_that_nobody_wants_may_have_one_name(tmp_path: Path) -> None:
    path = write(tmp_path / "notes.csv", b"user,text,,\nann,hello,,\n")
    assert list(Corpus(path)) == [Document("ann", "hello")]


def test_files_globs_and_directories_are_one_corpus(tmp_path: Path) -> None:
    for name in ("b.csv", "a.jsonl", "c.parquet"):
        write(tmp_path / name, CONTENTS["CSV" if "csv" in name else "Parquet" if "parquet" in name else "CSV"])
    corpus = Corpus([tmp_path / "c.parquet", tmp_path / "*.csv", f"{tmp_path}/*", tmp_path / "b.csv"], "ID", "dialogue")
    assert list(corpus) == EXPECTED * 3, "each file once"
    with pytest.raises(CorpusError, match="no such file"):
        Corpus([tmp_path / "a.jsonl", tmp_path / "*.zip"])


def test_an_id_is_one_user_in_every_format_and_beside_any_other(tmp_path: Path) -> None:
    """A reader that guesses the type of a column lets one user's id change the ids of all others."""
    types = (
        pa.int64(),
        pa.float64(),
        pa.float32(),
        pa.decimal128(38, 0),
        pa.string(),
        pa.dictionary(pa.int8(), pa.string()),
    )
    for number, kind in enumerate(types):
        ids = pa.array([7, None], pa.int64()).cast(pa.string()) if pa.types.is_dictionary(kind) else pa.array([7, None])
        ids = ids.dictionary_encode() if pa.types.is_dictionary(kind) else ids.cast(kind)
        parquet.write_table(pa.table({"user": ids, "text": ["a", "b"]}), tmp_path / f"{number}.parquet")
    write(tmp_path / "gaps.csv", b"user,text\n7.0,a\n,b\n")
    write(tmp_path / "other.csv", b"user,text\n7,a\n,b\nA007,c\n007,d\n")
    write(
        tmp_path / "lines.jsonl",
        b'{"user": " 7 ", "text": "a"}\n{"user": 7.0, "text": "a"}\n{"user": null, "text": "b"}\n',
    )
    corpus = Corpus(f"{tmp_path}/*.*", skip_bad=True)
    assert sorted(corpus) == sorted([Document("7", "a")] * 10 + [Document("A007", "c"), Document("007", "d")])
    assert dict(corpus.skipped) == {"field 'user': names no user": 9}


def test_a_text_that_many_rows_share_is_not_in_memory_many_times(tmp_path: Path) -> None:
    """A dictionary of Parquet holds a text once, so the size of a file says little about the size of its rows."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 4096), ["x" * 2**18])
    table = pa.table({"user": [str(row) for row in range(4096)], "text": column})
    parquet.write_table(table, tmp_path / "notes.parquet", store_schema=False)
    assert (tmp_path / "notes.parquet").stat().st_size < 2**20
    before, peak = pa.total_allocated_bytes(), 0
    for _ in zip(Corpus(tmp_path / "notes.parquet", skip_bad=True), range(50), strict=False):
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < 64 * 2**20


def test_a_corpus_of_bad_rows_says_why_it_has_no_documents(tmp_path: Path) -> None:
    corpus = Corpus(write(tmp_path / "notes.jsonl", b'{"user": "ann"}\nx\n{"user": "bob"}\n'), skip_bad=True)
    assert list(corpus) == []
    assert "has no documents: 3 rows are bad and were skipped: 2 field 'text': is missing, 1 is not JSON" in str(
        corpus.empty()
    )


def test_rows_are_users_of_their_own_whatever_rows_are_before_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "one"}\n')
    first, second, again = (document.user for document in Corpus(path, users="row"))
    assert first == again != second
    path.write_text('{"text": "two"}\n')
    assert [document.user for document in Corpus(path, users="row")] == [second]
    assert Corpus(path, users="block:512").block == 512
    for wrong in ("rows", "block:", "block:1", "block:x", "person"):
        with pytest.raises(InputError, match="users: must be row or block:TOKENS"):
            Corpus(path, users=wrong)
