"""The locked requirements."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

PIN = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+)", re.MULTILINE)


def lock(accelerator: str) -> str:
    return (ROOT / f"cluster/requirements.{accelerator}.lock").read_text()


def pins(text: str) -> dict[str, str]:
    return {found["name"]: found["version"] for found in PIN.finditer(text)}
