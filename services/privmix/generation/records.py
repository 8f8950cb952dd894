"""Reads the JSON Schemas of records."""

import json
from pathlib import Path
from typing import Any

from privmix.foundation.errors import InputError


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
