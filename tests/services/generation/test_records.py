"""Claim: records become one row each, and a column has the type that its schema has, whatever the values."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from pyarrow import parquet

from privmix.foundation.errors import InputError
from privmix.generation.records import read_schema, records_of, write_records

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "place": {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False},
        "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    },
    "properties": {
        "name": {"type": "string"},
        "visits": {"type": "integer"},
        "share": {"type": "number"},
        "urgent": {"type": "boolean"},
        "label": {"enum": ["routine", "urgent", None]},
        "grade": {"enum": [1, 2.5]},
        "nullable": {"type": ["integer", "null"]},
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "union": {"type": ["string", "integer"]},
        "numbers": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"$ref": "#/$defs/place"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "open": {"type": "object", "properties": {"a": {}}},
        "tree": {"$ref": "#/$defs/tree"},
        "anything": {},
        "nothing": {"type": "null"},
        "both": {"allOf": [{"minLength": 1}, {"type": "string"}]},
    },
}
WHOLE: dict[str, Any] = {
    "name": "Ann", "visits": 3, "share": 1, "urgent": True, "label": "routine", "grade": 1, "nullable": 4,
    "optional": "x", "union": "7", "numbers": 1, "tags": ["a"], "place": {"city": "Bern"}, "places": [{"city": "Ulm"}],
    "open": {"a": 1, "b": 2}, "tree": [[]], "anything": "x", "nothing": None, "both": "y",
}  # fmt: skip
NULLS: dict[str, Any] = WHOLE | {
    "label": None,
    "nullable": None,
    "optional": None,
    "anything": None,
    "union": 7,
    "share": 0.5,
}
FEW: dict[str, Any] = {"name": "Bob", "numbers": 0.5, "tags": [], "places": [], "visits": 3.0}


def write(directory: Path, records: list[dict[str, Any]]) -> str:
    directory.mkdir()
    return str(write_records(directory, SCHEMA, records))


def test_the_types_of_columns_follow_the_schema_and_not_the_values(tmp_path: Path) -> None:
    jobs: list[list[dict[str, Any]]] = [[WHOLE], [NULLS], [FEW], [NULLS, FEW, WHOLE], []]
    files = [write(tmp_path / str(number), records) for number, records in enumerate(jobs)]
    first, *others = [parquet.read_schema(file) for file in files]
    assert all(schema == first for schema in others)
    assert {name: str(first.field(name).type) for name in first.names} == {
        **dict.fromkeys(("name", "label", "optional", "union", "open", "anything", "nothing", "both"), "string"),
        **dict.fromkeys(("share", "grade", "numbers"), "double"),
        **{"visits": "int64", "nullable": "int64", "urgent": "bool"},
        "tags": "list<element: string>",
        "place": "struct<city: string>",
        "places": "list<element: struct<city: string>>",
        "tree": str(first.field("tree").type),
    }


def test_several_jobs_are_one_data_set(tmp_path: Path) -> None:
    jobs: list[list[dict[str, Any]]] = [[WHOLE], [NULLS], [], [FEW]]
    files = [write(tmp_path / str(number), records) for number, records in enumerate(jobs)]
    whole, nulls, few = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert (whole["union"], nulls["union"], few["union"]) == ('"7"', "7", None), "text has quotes in each file"
    assert (whole["share"], nulls["share"], few["share"]) == (1.0, 0.5, None)
    assert (nulls["nullable"], nulls["label"], few["visits"]) == (None, None, 3)
    assert (whole["places"], few["places"]) == ([{"city": "Ulm"}], [])
    assert json.loads(whole["open"]) == {"a": 1, "b": 2}


def test_values_that_a_column_cannot_hold_are_null(tmp_path: Path) -> None:
    """The job's JSON Lines keep them."""
    records: list[dict[str, Any]] = [
        {"visits": 10**30, "share": 10**400, "name": "a\ud800b"},
        {"visits": 2**63 - 1, "nullable": -(2**63)},
    ]
    rows = parquet.read_table(write(tmp_path / "job", records)).to_pylist()
    assert [(row["visits"], row["share"], row["name"], row["nullable"]) for row in rows] == [
        (None, None, "a\ufffdb", None),
        (2**63 - 1, None, None, -(2**63)),
    ]


def test_records_that_the_token_limit_cut_are_left_out() -> None:
    lines: list[dict[str, Any]] = [{"text": json.dumps(FEW)}, {"text": '{"name": "cut'}, {"text": "[1]"}]
    assert records_of(lines) == [FEW]


@pytest.mark.parametrize("content", ["", "[]", '{"type": "string"}', '{"type": "object"}'])
def test_a_schema_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "schema.json"
    file.write_text(content)
    with pytest.raises(InputError, match="schema"):
        read_schema(file)
    with pytest.raises(InputError, match="schema"):
        read_schema(tmp_path / "absent.json")
