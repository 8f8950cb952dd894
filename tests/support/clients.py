"""Clients of a running service."""

import json
import subprocess
import sys

import openai

from tests.running import RunningService, eventually, settled

CHAT = [{"role": "user", "content": "When does the clinic open?"}]


def client_of(service: RunningService) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="none", max_retries=0, timeout=300)


def costs(service: RunningService, before: int, tokens: int) -> None:
    """Checks that exactly `tokens` tokens were charged."""
    eventually(service, lambda _, now: now == before + tokens)
    assert settled(service) == before + tokens


def scale(service: RunningService, shards: int) -> int:
    """Runs `privmix scale` and returns the new number of parts from its output."""
    command = [sys.executable, "-m", "privmix", "scale", "--shards", str(shards), "--json"]
    where = ["--address", service.ray_address, "--namespace", service.namespace]
    answer = subprocess.run([*command, *where], capture_output=True, text=True, check=True)
    parts: int = json.loads(answer.stdout)["parts"]
    return parts
