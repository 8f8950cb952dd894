"""Claim: the Dockerfile agrees with the lock and the manifests. `test_containers.py` builds and runs the image."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from privmix.gateway import front_door
from tests.k8s.manifests import K8S, Manifests
from tests.support.locks import lock, pins

REPOSITORY = K8S.parent


@pytest.fixture(scope="module")
def project() -> Any:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (K8S / "Dockerfile").read_text()


def test_the_cluster_runs_the_locked_ray(manifests: Manifests) -> None:
    assert manifests.cluster["rayVersion"] == pins(lock("gpu"))["ray"]


def test_the_image_bears_the_projects_version(manifests: Manifests, project: Any) -> None:
    for pod in manifests.pods():
        for container in pod["spec"]["containers"]:
            assert container["image"].startswith(f"privmix:{project['version']}-")


def test_the_image_starts_haproxy_which_ends_no_request_early(manifests: Manifests, dockerfile: str) -> None:
    variables = dict(re.findall(r"((?:RAY_)?SERVE_\w+)=(\S+)", dockerfile))
    assert Path(variables.pop("RAY_SERVE_HAPROXY_BINARY_PATH")).name == "privmix-haproxy"
    assert variables.items() <= front_door.ENVIRONMENT.items()
    assert len(variables) == len(front_door.ENVIRONMENT) - 1
    longest = yaml.safe_load(manifests.one("RayService")["spec"]["serveConfigV2"])["http_options"]["request_timeout_s"]
    assert variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == str(longest)


def test_the_base_image_is_named_by_version_and_digest(dockerfile: str) -> None:
    (python,) = re.findall(r"^ARG PYTHON=(\S+)$", dockerfile, re.MULTILINE)
    assert re.fullmatch(r"3\.11\.\d+-[a-z-]+@sha256:[0-9a-f]{64}", python)
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) == {"python:${PYTHON}"}
