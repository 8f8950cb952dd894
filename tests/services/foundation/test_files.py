"""Claim: JSON Lines come back as they were written, and files and directories have the mode that the umask allows."""

import os
from errno import ENOSPC
from pathlib import Path

import pytest

from privmix.foundation.errors import InputError, WorkError
from privmix.foundation.files import building, create_atomically, only_writer, replacing, write_atomically
from privmix.foundation.json_lines import load_lines, write_lines


def test_rows_are_loaded_as_they_were_written(tmp_path: Path) -> None:
    separators = [chr(code) for code in range(0x3000) if len(f"a{chr(code)}b".splitlines()) > 1]
    assert {"\n", "\r", "\x85", "\u2028"} < set(separators)
    rows = [{"text": f"a{separator}b", "number": number} for number, separator in enumerate(separators)]
    write_lines(tmp_path / "rows.jsonl", rows)
    assert load_lines(tmp_path / "rows.jsonl") == rows
    write_lines(tmp_path / "rows.jsonl", [])
    assert load_lines(tmp_path / "rows.jsonl") == []


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002])
@pytest.mark.parametrize("private", [True, False])
def test_modes_follow_the_umask_and_what_is_private_is_its_owners(tmp_path: Path, umask: int, private: bool) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "written", b"1", private=private)
        write_atomically(tmp_path / "written", b"2", private=private)
        create_atomically(tmp_path / "created", b"3", private=private)
        with pytest.raises(FileExistsError):
            create_atomically(tmp_path / "created", b"4", private=private)
        with building(tmp_path / "built", private=private) as unfinished:
            (unfinished / "file").write_bytes(b"5")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    file, folder = (0o600, 0o700) if private else (0o666 & ~umask, 0o777 & ~umask)
    assert modes == {"written": file, "created": file, "built": folder}
    assert ((tmp_path / "written").read_bytes(), (tmp_path / "created").read_bytes()) == (b"2", b"3")


def test_a_full_disk_is_named_and_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_atomically(path, b"old")
    with pytest.raises(OSError, match="No space") as error, replacing(path):
        raise OSError(ENOSPC, "No space left on device")  # as a write does, which has no name
    assert error.value.filename == str(path)
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (b"old", [path])
    with pytest.raises(OSError, match="No space") as error, building(tmp_path / "part"):
        raise OSError(ENOSPC, "No space left on device")
    assert error.value.filename == str(tmp_path / "part")


def test_a_directory_has_one_writer_of_a_kind(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with only_writer(output, "training"):
        with only_writer(output, "evaluation"):
            pass
        with pytest.raises(WorkError, match="another training is writing to it"), only_writer(output, "training"):
            pass
    with only_writer(output, "training"):
        (output / "file").touch()
    with pytest.raises(InputError, match="cannot be created"), only_writer(output / "file", "training"):
        pass
