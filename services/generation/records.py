"""Reads JSON Lines and the JSON Schemas of records, and writes the records of a job as Parquet."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from services.errors import InputError

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
    """Writes records with one column for each property. Values of several types, or objects, become JSON text.

    Returns:
        the path of the file.
    """
    import pyarrow as pa  # slow to import
    from pyarrow import parquet

    rows = list(records)
    columns = {name: _column(pa, [row.get(name) for row in rows]) for name in schema["properties"]}
    parquet.write_table(pa.table(columns), directory / RECORDS)
    return directory / RECORDS


def _column(arrow: Any, values: list[Any]) -> Any:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {str} or kinds <= {bool} or kinds <= {int} or kinds <= {int, float}:
        try:
            return arrow.array(values)
        except (OverflowError, arrow.ArrowInvalid):  # an integer beyond 64 bits
            pass
    return arrow.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values])
