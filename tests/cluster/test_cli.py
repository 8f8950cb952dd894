"""Claim: an expected error is one line, and its exit code tells users' errors from others."""

from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import Commands
from cluster.cli import app as privmix
from cluster.configuration import ConfigurationError
from services.budget.errors import LedgerCorrupt
from services.errors import InputError, WorkError


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


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(privmix, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"privmix {version('privmix')}\n")
