"""Runs the whole service, `privmix serve` in its own process tree, and kills parts of it."""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import psutil
import yaml

from tests.ensembles import write_ensemble

START_S = 480.0
HEALTH_S = 60.0
STOP_S = 60.0
PLANTED_HOST = "planted.example"
"""A setting that each service has from the environment of its command, in which a secret could be too."""


@dataclass
class RunningService:
    """A running service. `tree` lists its processes."""

    base_url: str
    namespace: str
    ledger: Path
    config: Path
    process: subprocess.Popen[bytes]
    privmix: Sequence[str] = (sys.executable, "-m", "privmix")

    def tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def actor(self, name: str) -> psutil.Process:
        """Returns the process of an actor, by the title that Ray gives it, name and method, or the one of a program."""
        for process in self.tree():
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if title.startswith(("ray::", name)) and name in title:
                return process
        raise LookupError(f"no process of {name}")

    @property
    def ray_address(self) -> str:
        """Returns the address of the service's own Ray, from the arguments of its raylet."""
        told = (argument for process in self.tree() for argument in process.cmdline())
        return next(
            argument.removeprefix("--gcs-address=") for argument in told if argument.startswith("--gcs-address=")
        )

    def kill_everything(self) -> None:
        for process in self.tree():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(STOP_S)

    def healthy(self) -> bool:
        return is_healthy(self.base_url)

    def wait_until_healthy(self, seconds: float = HEALTH_S) -> None:
        deadline = time.monotonic() + seconds
        while not self.healthy():
            if self.process.poll() is not None:
                raise RuntimeError(f"the service ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the service did not answer within {seconds:g} s")
            time.sleep(0.2)

    def privacy(self, client: httpx.Client | None = None) -> dict[str, Any]:
        """Returns the privacy statement. `client` sends an API key if one is needed."""
        get = client.get if client else httpx.get
        answer: dict[str, Any] = get(f"{self.base_url}/v1/privacy", timeout=30).raise_for_status().json()
        return answer

    def start(self) -> None:
        """Starts the process, also after a kill, and waits until it answers."""
        log = self.config.with_suffix(".log").open("ab")
        self.process = subprocess.Popen(
            [*self.privmix, "serve", "--config", str(self.config)],
            stdout=log,
            stderr=log,
            env={**os.environ, "PRIVMIX_HTTP__ALLOWED_HOSTS": f'["{PLANTED_HOST}"]'},
            start_new_session=True,
        )
        self.wait_until_healthy(START_S)

    def stop(self) -> None:
        """Ends the service with a signal, like Kubernetes and Ctrl-C."""
        tree = self.tree()
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        finally:
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def is_healthy(base_url: str) -> bool:
    """Tells whether the service at this URL can release private tokens."""
    try:
        answer = httpx.get(f"{base_url}/health", timeout=10)
        return answer.status_code == 200 and answer.json()["status"] == "ok"
    except (httpx.HTTPError, ValueError):  # nothing or another program answers
        return False


def free_port() -> int:
    """Returns a port that no other process takes before the service does.

    Excludes the kernel's ephemeral ports, which Ray's processes request at their start, and the ports of Ray's workers
    (10002 to 19999).
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


def own_ensemble(ensemble: Path, folder: Path) -> Path:
    """Copies an ensemble for one service, because an ensemble accepts only one ledger."""
    return copytree(ensemble, folder / "ensemble")


def configure(folder: Path, ensemble: Path, **sections: dict[str, Any]) -> Path:
    """Writes a test configuration with short contexts, a small cache and a free port."""
    defaults: dict[str, dict[str, Any]] = {
        "privacy": {"q": 0.5, "epsilon": 8.0, "delta": 1e-5, "tokens": 20_000},
        "budget": {"ledger": "ledger.db", "lease_tokens": 16},
        "engine": {"context_length": 512, "cache_gib": 1},
        "http": {"port": free_port(), "max_tokens": 256},
    }
    if "protocol" in sections.get("privacy", {}):
        del defaults["privacy"]["q"]  # PMixED's
    values = {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {**defaults, **sections}}
    path = folder / "privmix.yaml"
    path.write_text(yaml.safe_dump({"ensemble": str(ensemble), "namespace": folder.name, **values}))
    return path


def configure_small(folder: Path, **sections: dict[str, Any]) -> Path:
    """Writes an ensemble of two parts, and a configuration by which transformers serves it in short contexts."""
    engine, ensemble = {"kind": "transformers", "context_length": 256}, write_ensemble(folder / "ensemble", 2)
    return configure(folder, ensemble, engine=engine, http={"max_tokens": 200}, **sections)


@contextmanager
def running(config: Path, privmix: Sequence[str] = (sys.executable, "-m", "privmix")) -> Iterator[RunningService]:
    """Starts a service from its configuration with the command `privmix`; ends its processes with the context."""
    values = yaml.safe_load(config.read_text())
    service = RunningService(
        base_url=f"http://127.0.0.1:{values['http']['port']}",
        namespace=values["namespace"],
        ledger=config.parent / values["budget"]["ledger"],
        config=config,
        process=None,  # type: ignore[arg-type]
        privmix=privmix,
    )
    try:
        service.start()
        yield service
    finally:
        if service.process is not None:
            service.stop()


def settled(service: RunningService, client: httpx.Client | None = None) -> int:
    """Waits until every lease is settled; returns the charged tokens."""
    return eventually(service, lambda earlier, now: earlier == now, client)


def eventually(service: RunningService, true: Callable[[int, int], bool], client: httpx.Client | None = None) -> int:
    """Waits until ``true`` holds for two readings of the charged tokens, a moment apart; returns the second."""
    earlier = service.privacy(client)["tokens_charged"]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(1)
        now: int = service.privacy(client)["tokens_charged"]
        if true(earlier, now):
            return now
        earlier = now
    raise TimeoutError(f"after 60 s {earlier} tokens are charged")
