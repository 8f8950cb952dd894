"""Runs `privmix` in this process, as on a wide terminal without colours."""

from collections.abc import Mapping

from typer.testing import CliRunner, Result

from privmix_cluster.cli import app

TERMINAL = {"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}


def privmix(*words: object, environment: Mapping[str, str] | None = None) -> Result:
    """Runs a command with these words, and with variables of the environment beside those of the terminal."""
    return CliRunner(env={**TERMINAL, **(environment or {})}).invoke(app, [*map(str, words)])
