"""Reads the JSON Schemas of records, and writes the records of a job as Parquet."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from privmix.foundation.errors import InputError

RECORDS = "records.parquet"


def read_schema(path: Path) -> dict[str, Any]:
    """Reads a JSON Schema of an object.

    Raises:
        InputError: the file cannot be read or is not JSON, or the schema does not describe an object with properties.
    """
    try:
        schema = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"schema {path}: cannot be read as JSON: {error}") from error
    if not isinstance(schema, dict) or schema.get("type") != "object" or not isinstance(schema.get("properties"), dict):
        raise InputError(f"schema {path}: must describe an object: give the type object, and its properties")
    return schema


def records_of(texts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records in a job's complete texts (`job.load_output`), without those that the token limit cut."""
    parsed = []
    for text in texts:
        try:
            value = json.loads(text["text"])
        except ValueError:
            continue
        if isinstance(value, dict):
            parsed.append(value)
    return parsed


def write_records(directory: Path, schema: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> Path:
    """Writes records with one column for each property of the schema (see `privmix.generation.columns`).

    Returns:
        the path of the file.
    """
    import pyarrow as pa  # slow to import
    from pyarrow import parquet

    from privmix.generation.columns import RecordColumn, columns

    rows = list(records)

    def array(name: str, column: RecordColumn) -> Any:
        return pa.array([column.value(row.get(name)) for row in rows], column.type)

    arrays = {name: array(name, column) for name, column in columns(schema).items()}
    table = pa.table(arrays)
    with parquet.ParquetWriter(directory / RECORDS, table.schema) as writer:
        if rows:  # `load_dataset` cannot read a group of no rows
            writer.write_table(table)
    return directory / RECORDS
