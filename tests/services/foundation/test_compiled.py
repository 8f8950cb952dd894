"""Claim: each C++ file of operators is built once for a machine; a machine without a compiler says so and goes on."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from privmix.foundation import compiled
from privmix.privacy.mollifiers import rows


def test_a_machine_without_a_compiler_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiled.operators.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger=compiled.__name__):
            assert [compiled.operators(rows.SOURCE) for _ in range(2)] == [None, None]
        said = [record.message for record in caplog.records if record.name == compiled.__name__]
        assert ["rows.cpp" in message and "no C++ compiler works here" in message for message in said] == [True]
        assert not list(tmp_path.glob("*.so"))
    finally:
        compiled.operators.cache_clear()


@pytest.mark.slow
def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    """This includes the files that a killed build leaves."""
    program = (
        "from privmix.foundation import compiled; from privmix.privacy.mollifiers import rows; "
        "print(compiled.operators(rows.SOURCE).shape_parts)"
    )
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    (tmp_path / "lock").touch()
    started = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in started] == ["privmix.shape_parts"] * 2
    assert len(list(tmp_path.glob("*.so"))) == 1
