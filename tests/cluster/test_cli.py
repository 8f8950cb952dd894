"""Claim: an expected error is one line, and its exit code tells users' errors from others."""

import os
import subprocess
import sys
from errno import EACCES, ENOSPC
from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

from privmix.foundation.errors import ConfigurationError, InputError, LedgerCorrupt, WorkError
from privmix_cluster.cli import FIXES, Commands


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("rank: too small"), 2),
        (ConfigurationError("http.port: taken"), 2),
        (WorkError("part-0: failed"), 1),
        (LedgerCorrupt("row 3 was changed"), 1),
        (KeyboardInterrupt(), 130),
        (OSError(ENOSPC, "No space left on device", "parts"), 1),
        (PermissionError(EACCES, "Permission denied", "/home/x"), 1),
    ],
)
def test_an_error_is_one_line_and_a_code(error: BaseException, code: int) -> None:
    app = typer.Typer(cls=Commands)

    @app.command()
    def work() -> None:
        raise error

    @app.command()
    def rest() -> None:
        pass

    result = CliRunner().invoke(app, ["work"])
    words = str(error) or "interrupted; run it again to continue"
    if isinstance(error, OSError):
        words = f"{error.filename}: {error.strerror}; {FIXES[error.errno or 0]}"
    assert (result.exit_code, result.stderr) == (code, f"privmix work: {words}\n")
    assert CliRunner().invoke(app, ["rest"]).exit_code == 0


def test_an_output_of_few_characters_ends_no_command() -> None:
    command = [sys.executable, "-m", "privmix", "protocols"]  # which prints names of authors
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_an_unexpected_error_is_not_hidden() -> None:
    app = typer.Typer(cls=Commands)
    app.callback()(lambda: None)
    app.command("work")(lambda: 1 // 0)
    assert isinstance(CliRunner().invoke(app, ["work"]).exception, ZeroDivisionError)


def test_a_missing_package_of_an_extra_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    app = typer.Typer(cls=Commands)
    app.callback()(lambda: None)
    app.command("work")(lambda: import_module("matplotlib"))
    result = CliRunner().invoke(app, ["work"])
    message = "privmix work: needs the package matplotlib, which is not installed: pip install 'privmix[lab]'\n"
    assert (result.exit_code, result.stderr) == (1, message)
