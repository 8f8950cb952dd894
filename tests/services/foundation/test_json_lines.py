"""Claim: JSON Lines are read in each encoding that names itself, and a bad line is named and not quoted."""

import json
from pathlib import Path
from typing import Any

import pytest

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import read_lines


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_lines_are_read_whatever_their_ends_and_their_content(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"text": "one\u2028text"}, {"text": "next\x85line"}]
    first, second = (json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(f"{first}\r\n\n{second}".encode(encoding))
    assert list(read_lines(path, "an object")) == [(1, rows[0]), (3, rows[1])]
    path.write_text(f'{first}\n["heliotrope"]')
    with pytest.raises(InputError, match=r"^real .*: line 2: must be an object$"):
        list(read_lines(path, "an object", "real"))
    path.write_text("heliotrope")
    with pytest.raises(InputError, match="line 1: is not JSON") as refused:
        list(read_lines(path, "an object"))
    assert "heliotrope" not in str(refused.value)
