"""Claim: records become one row each, with one column for each property of the schema and its type."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from services.errors import InputError
from services.generation.records import read_lines, read_schema, records_of, write_records


def test_records_become_rows_with_types(tmp_path: Path) -> None:
    properties: dict[str, Any] = {name: {} for name in ("name", "visits", "urgent", "share", "tags", "huge", "mixed")}
    texts = [
        {"name": "Ann", "visits": 3, "urgent": True, "share": 0.5, "tags": ["a"], "huge": 10**30, "mixed": 1},
        {"name": None, "visits": 4, "urgent": False, "share": 1, "tags": [], "huge": 1, "mixed": "x"},
    ]
    lines: list[dict[str, Any]] = [{"text": json.dumps(text)} for text in texts]
    records = records_of([*lines, {"text": '{"name": "cut'}, {"text": "[1]"}])
    assert records == texts, "a record that the token limit cut is left out"
    table = parquet.read_table(write_records(tmp_path, {"properties": properties}, records))
    assert table.to_pydict() == {
        "name": ["Ann", None],
        "visits": [3, 4],
        "urgent": [True, False],
        "share": [0.5, 1.0],
        "tags": ['["a"]', "[]"],
        "huge": [str(10**30), "1"],
        "mixed": ["1", '"x"'],
    }


def test_lines_are_read_whatever_their_ends_and_their_content(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"text": "one\u2028text"}, {"text": "next\x85line"}]
    first, second = (json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(f"\ufeff{first}\r\n\n{second}".encode())
    assert list(read_lines(path, "an object")) == [(1, rows[0]), (3, rows[1])]
    path.write_text(f'{first}\n["heliotrope"]')
    with pytest.raises(InputError, match=r"^real .*: line 2: must be an object$"):
        list(read_lines(path, "an object", "real"))
    path.write_text("heliotrope")
    with pytest.raises(InputError, match="line 1: is not JSON") as refused:
        list(read_lines(path, "an object"))
    assert "heliotrope" not in str(refused.value)


def test_no_record_is_a_table_without_rows(tmp_path: Path) -> None:
    table = parquet.read_table(write_records(tmp_path, {"properties": {"name": {}}}, []))
    assert (table.column_names, table.num_rows) == (["name"], 0)


@pytest.mark.parametrize("content", ["", "[]", '{"type": "string"}', '{"type": "object"}'])
def test_a_schema_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "schema.json"
    file.write_text(content)
    with pytest.raises(InputError, match="schema"):
        read_schema(file)
    with pytest.raises(InputError, match="schema"):
        read_schema(tmp_path / "absent.json")
