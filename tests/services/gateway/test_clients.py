"""Claim: common client packages work with the service without modification.

Their dependencies conflict with those of privmix, so they are installed in an environment of their own in the user's
cache.
"""

import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from shutil import rmtree

import platformdirs
import psutil
import pytest
import yaml
from filelock import FileLock

from tests.running import RunningService, free_port
from tests.support.waiting import until

# Long, because the environment is installed from the package index.
pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "clients"
KEY = "none"
MASTER = f"sk-{token_hex(32)}"


@pytest.fixture(scope="session")
def clients() -> Path:
    """Installs the optional dependencies `clients` once. Returns the bin folder of their environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"]["clients"]
    mark = sha256(repr((wanted, sys.version_info)).encode()).hexdigest()[:16]
    folder = platformdirs.user_cache_path("privmix", ensure_exists=True) / f"clients-{mark}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "installed").exists():
            rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            # The old pip of an older Python resolves dependencies much more slowly.
            subprocess.run([folder / "bin/pip", "install", "--quiet", "--upgrade", "pip"], check=True)
            subprocess.run([folder / "bin/pip", "install", "--quiet", *wanted], check=True)
            (folder / "installed").touch()
    return folder / "bin"


def run(*command: object) -> None:
    """Runs a client, which checks its answers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=900, env=environment, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("with_*.py")), ids=lambda script: script.stem)
def test_a_client_package_works(service: RunningService, clients: Path, script: Path) -> None:
    run(clients / "python", script, f"{service.base_url}/v1", KEY)


@contextmanager
def litellm(service: RunningService, clients: Path, folder: Path) -> Iterator[str]:
    """Runs LiteLLM's proxy in front of the service. Yields its URL."""
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
        said = (folder / "litellm.log").read_text
        until(lambda: _listens(port, process, said), 120, said, pause_s=0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


def _listens(port: int, process: subprocess.Popen[bytes], said: Callable[[], str]) -> bool:
    assert process.poll() is None, said()
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_litellm_proxy_works(service: RunningService, clients: Path, tmp_path: Path) -> None:
    with litellm(service, clients, tmp_path) as url:
        run(clients / "python", SCRIPTS / "with_openai.py", url, MASTER)
