"""Claim: the example runs as it is."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "cluster" / "examples" / "private_token.py"


def test_a_private_token_without_a_service() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    radius, token = done.stdout.splitlines()
    assert radius.startswith("radius ")
    assert 0 <= int(token.removeprefix("token ")) < 1000
