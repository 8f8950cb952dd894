"""Claim: a schema that does not describe records is refused."""

from pathlib import Path

import pytest

from privmix.foundation.errors import InputError
from privmix.generation.records import read_schema


@pytest.mark.parametrize("content", ["", "[]", '{"type": "string"}', '{"type": "object"}'])
def test_a_schema_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "schema.json"
    file.write_text(content)
    with pytest.raises(InputError, match="schema"):
        read_schema(file)
    with pytest.raises(InputError, match="schema"):
        read_schema(tmp_path / "absent.json")
