"""Claim: JSON Lines come back as they were written, whatever characters their texts contain."""

from pathlib import Path

from privmix.foundation.json_lines import load_lines, write_lines


def test_rows_are_loaded_as_they_were_written(tmp_path: Path) -> None:
    separators = [chr(code) for code in range(0x3000) if len(f"a{chr(code)}b".splitlines()) > 1]
    assert {"\n", "\r", "\x85", "\u2028"} < set(separators)
    rows = [{"text": f"a{separator}b", "number": number} for number, separator in enumerate(separators)]
    write_lines(tmp_path / "rows.jsonl", rows)
    assert load_lines(tmp_path / "rows.jsonl") == rows
    write_lines(tmp_path / "rows.jsonl", [])
    assert load_lines(tmp_path / "rows.jsonl") == []
