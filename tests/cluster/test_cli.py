"""Claim: an expected error is one line, and its exit code tells users' errors from others."""

import subprocess
import sys
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import VERBS, Commands, load
from cluster.cli import app as privmix
from services.errors import ConfigurationError, InputError, LedgerCorrupt, WorkError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("rank: too small"), 2),
        (ConfigurationError("http.port: taken"), 2),
        (WorkError("part-0: failed"), 1),
        (LedgerCorrupt("row 3 was changed"), 1),
        (KeyboardInterrupt(), 130),
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
    assert (result.exit_code, result.stderr) == (code, f"privmix work: {words}\n")
    assert CliRunner().invoke(app, ["rest"]).exit_code == 0


def test_an_unexpected_error_is_not_hidden() -> None:
    app = typer.Typer(cls=Commands)
    app.callback()(lambda: None)
    app.command("work")(lambda: 1 // 0)
    assert isinstance(CliRunner().invoke(app, ["work"]).exception, ZeroDivisionError)


def test_the_help_lists_each_verb_with_the_first_line_of_its_own_help() -> None:
    assert {name: load(name).help.splitlines()[0] for name in VERBS} == VERBS
    assert [load(name).name for name in VERBS] == list(VERBS)


LIGHT = (
    *("alerts", "alerts test", "budget", "demo-corpus", "protocols"),
    *("quickstart", "scale", "serve", "split", "status", "topology"),
)
"""The verbs whose help imports none of the packages that take seconds, and hundreds of megabytes."""


@pytest.mark.parametrize("line", ["--help", "--version", *(f"{verb} --help" for verb in LIGHT)])
def test_help_imports_no_heavy_package(line: str) -> None:
    heavy = {"torch", "ray", "numpy", "sqlalchemy", "transformers"}
    code = (
        "import sys\nfrom cluster.cli import app\n"
        f"app({line.split()!r}, prog_name='privmix', standalone_mode=False)\n"
        f"print(*sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.strip() == ""
    assert "privmix" in done.stdout


def test_an_unknown_verb_is_a_usage_error() -> None:
    result = CliRunner().invoke(privmix, ["serv"])
    assert result.exit_code == 2
    assert "No such command 'serv'" in result.stderr


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(privmix, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"privmix {version('privmix')}\n")
