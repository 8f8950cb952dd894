"""Runs `privmix` in this process, as on a wide terminal without colours, and without a client's key."""

import json
from collections.abc import Mapping
from typing import Any

from typer.testing import CliRunner, Result

from privmix_cluster.cli import app

TERMINAL = {"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb", "OPENAI_API_KEY": ""}


def privmix(*words: object, environment: Mapping[str, str] | None = None) -> Result:
    """Runs a command with these words, and with variables of the environment beside those of the terminal."""
    return CliRunner(env={**TERMINAL, **(environment or {})}).invoke(app, [*map(str, words)])


def reported(*words: object) -> Any:
    """Runs a command that succeeds, with `--json`, and returns its report."""
    done = privmix(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(*words: object) -> str:
    """Runs a command that is refused as a user's error, and returns its words, without the lines of a box."""
    done = privmix(*words)
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.replace("│", " ").split())
