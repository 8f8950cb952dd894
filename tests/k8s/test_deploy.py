"""Claim: Ray Serve's own command deploys the manifest's application on a Ray cluster of this machine."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.k8s.manifests import Manifests, render
from tests.running import START_S, free_port, own_ensemble

pytestmark = pytest.mark.slow

CLUSTER = "import ray, signal; ray.init('local', include_dashboard=True, dashboard_port={port}); signal.pause()"
ACTORS = ("Coordinator", "Shard", "Fleet", "Budget")
KEY, LEDGER = "a key of the operator", "the-ledger.db"


class Cluster:
    """A Ray head with the environment of the manifest's pods, including Ray's token."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._dashboard = free_port()
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
        self._environment = {**os.environ, **token, **environment}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER.format(port=self._dashboard)],
            env=self._environment,
            start_new_session=True,
        )
        self._until(lambda: httpx.get(f"{self._address}/api/gcs_healthz").is_success)

    def deploy(self, config: dict[str, Any], folder: Path) -> Any:
        """Deploys the application and returns its final `serve status`."""
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        self._serve("deploy", str(file))
        self._until(lambda: self._status()["status"] in {"RUNNING", "DEPLOY_FAILED"})
        return self._status()

    def processes(self) -> dict[str, int]:
        """Returns the process id of each actor behind the route."""
        titles = {process.pid: " ".join(process.cmdline()) for process in self._tree()}
        return {
            name: pid for name in ACTORS for pid, title in titles.items() if title.startswith("ray::") and name in title
        }

    def environments(self) -> list[str]:
        """Returns the environments of all processes of the cluster, as text."""
        shown = []
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                shown.append(str(process.environ()))
        return shown

    def stop(self) -> None:
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):  # the process ended with its parent
                process.kill()
        self._process.wait()

    @property
    def _address(self) -> str:
        return f"http://127.0.0.1:{self._dashboard}"

    def _status(self) -> Any:
        return yaml.safe_load(self._serve("status"))["applications"]["privmix"]

    def _serve(self, command: str, *arguments: str) -> str:
        serve = [sys.executable, "-m", "ray.serve.scripts", command, "--address", self._address, *arguments]
        return subprocess.run(serve, env=self._environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    def _until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if true():
                    return
            except httpx.HTTPError:
                assert self._process.poll() is None, "the cluster has ended"
            assert time.monotonic() < deadline, "the application did not come up"
            time.sleep(1)

    def _tree(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]


@pytest.fixture(scope="module")
def environment(ensemble: Path, manifests: Manifests, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a pod from volumes and Secrets, after the Job that creates the ledger."""
    folder = tmp_path_factory.mktemp("pod")
    (config := folder / "privmix.yaml").write_text(manifests.configuration())
    environment = {
        "PRIVMIX_ENSEMBLE": str(own_ensemble(ensemble, folder)),
        "PRIVMIX_BUDGET__LEDGER_FILE": str(folder / "url"),
        "PRIVMIX_BUDGET__ANCHOR": str(folder),
        "PRIVMIX_HTTP__API_KEYS_FILE": str(folder / "api-keys"),
        "HOME": str(folder),
    }
    (folder / "url").write_text(str(folder / LEDGER))
    (folder / "api-keys").write_text(json.dumps([KEY]))
    init = [sys.executable, "-m", "privmix", "ledger", "init", "--config", str(config)]
    subprocess.run(init, env={**os.environ, **environment}, check=True)
    return environment


@pytest.fixture
def cluster(environment: dict[str, str]) -> Iterator[Cluster]:
    started = Cluster(environment)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    return render("cpu-dev")


def located(manifests: Manifests, config: Path, port: int) -> Any:
    """Returns the manifest's serveConfigV2 with the path of the configuration and a free port."""
    serve = manifests.serve_config()
    serve["applications"][0]["args"]["config"] = str(config)
    serve["http_options"]["port"] = port
    return serve


def ask(port: int, key: str) -> httpx.Response:
    asked = {"model": "privmix", "prompt": "Caller: Hello", "max_tokens": 4}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, headers=headers, timeout=120)


def test_the_manifests_application_deploys_and_keeps_its_actors(
    cluster: Cluster, manifests: Manifests, tmp_path: Path
) -> None:
    port = free_port()
    failed = cluster.deploy(located(manifests, tmp_path / "missing.yaml", port), tmp_path)
    place = f"{tmp_path / 'missing.yaml'}: cannot be read"
    assert failed["message"].startswith(f"Deploying app 'privmix' failed with exception:\n{place}")

    before: dict[str, int] = {}
    for name in ("first.yaml", "second.yaml"):
        (tmp_path / name).write_text(manifests.configuration())
        deployed = cluster.deploy(located(manifests, tmp_path / name, port), tmp_path)
        assert deployed["status"] == "RUNNING", deployed["message"]
        assert set(cluster.processes()) == set(ACTORS)
        assert not before or cluster.processes() == before
        before = cluster.processes()

        assert not {word for word in (KEY, LEDGER) for environ in cluster.environments() if word in environ}
        assert ask(port, "another key").status_code == 401
        assert ask(port, KEY).raise_for_status().json()["usage"]["completion_tokens"] == 4
