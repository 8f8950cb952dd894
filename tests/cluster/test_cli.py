"""Claim: an expected error is one line, and its exit code tells users' errors from others."""

import os
import subprocess
import sys
from collections.abc import Iterator
from errno import EACCES, ENOSPC
from importlib import import_module
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from privmix.foundation.errors import ConfigurationError, InputError, LedgerCorrupt, WorkError
from privmix_cluster.cli import FIXES, VERBS, Commands, load


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


@pytest.mark.parametrize("encoding", ["koi8-r", "cp1251", "ascii"])
def test_an_output_of_few_characters_ends_no_command(encoding: str) -> None:
    command = [sys.executable, "-m", "privmix", "protocols"]  # which prints names of authors
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    ran = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_an_unexpected_error_is_not_hidden() -> None:
    app = typer.Typer(cls=Commands)
    app.callback()(lambda: None)
    app.command("work")(lambda: 1 // 0)
    assert isinstance(CliRunner().invoke(app, ["work"]).exception, ZeroDivisionError)


def test_the_help_lists_each_verb_with_the_first_line_of_its_own_help() -> None:
    assert {name: load(name).help.splitlines()[0] for name in VERBS} == VERBS
    assert [load(name).name for name in VERBS] == list(VERBS)


HELP_PACKAGES = {
    *("typer", "shellingham", "rich", "attr", "markdown_it", "mdurl", "pygments"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"),
}
"""The installed packages that help may import. The others take seconds and hundreds of megabytes."""
HELP_MEMORY = 80 * 2**20

PRINT_HELP = """
import sys
from pathlib import Path

at_start = set(sys.modules)
from privmix_cluster.cli import app

def installed():
    found = [(name, getattr(module, "__file__", None) or "") for name, module in sys.modules.items()]
    return {name.partition(".")[0] for name, file in found if name not in at_start and "site-packages" in file}

for line in sys.stdin.read().splitlines():
    before = installed()
    app([*line.split(), "--help"], prog_name="privmix", standalone_mode=False)
    print(f"{line} imports", *sorted(installed() - before - HELP_PACKAGES), file=sys.stderr)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(status["VmHWM"].split()[0], file=sys.stderr)
"""


def commands(command: Any, name: str = "") -> Iterator[str]:
    """Yields the names of a command and of its subcommands, with those before them."""
    yield name
    for each, subcommand in getattr(command, "commands", {}).items():
        yield from commands(subcommand, f"{name} {each}")


def test_help_of_all_commands_is_light() -> None:
    lines = ["", *(line for verb in VERBS for line in commands(load(verb), verb))]
    assert {"heads prepare mimic-extract", "audit released", "keys create", "train"} <= set(lines)
    code = f"HELP_PACKAGES = {HELP_PACKAGES!r}\n{PRINT_HELP}"
    done = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(lines), check=True, capture_output=True, text=True
    )
    *imports, memory = done.stderr.splitlines()
    assert imports == [f"{line} imports" for line in lines]
    assert done.stdout.count("Usage: privmix") == len(lines)
    assert int(memory) * 1024 < HELP_MEMORY


def test_a_missing_package_of_an_extra_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    app = typer.Typer(cls=Commands)
    app.callback()(lambda: None)
    app.command("work")(lambda: import_module("matplotlib"))
    result = CliRunner().invoke(app, ["work"])
    message = "privmix work: needs the package matplotlib, which is not installed: pip install 'privmix[lab]'\n"
    assert (result.exit_code, result.stderr) == (1, message)
