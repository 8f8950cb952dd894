"""Claim: the Dockerfile agrees with the lock, the project and the manifests. These tests do not build an image."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.manifests import K8S, Manifests
from tests.support.locks import lock, pins

REPOSITORY = K8S.parent


@pytest.fixture(scope="module")
def project() -> Any:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (K8S / "Dockerfile").read_text()


def arguments(dockerfile: str, instruction: str) -> list[str]:
    return re.findall(rf"^{instruction} (.+)$", dockerfile, re.MULTILINE)


def test_the_cluster_runs_the_locked_ray(manifests: Manifests) -> None:
    assert manifests.cluster["rayVersion"] == pins(lock("gpu"))["ray"]


def test_the_image_bears_the_projects_version(manifests: Manifests, project: Any) -> None:
    for pod in manifests.pods():
        for container in pod["spec"]["containers"]:
            assert container["image"].startswith(f"privmix:{project['version']}-")


def test_the_image_installs_from_the_locks_alone(dockerfile: str) -> None:
    installed = [item for item in arguments(dockerfile, "RUN") if "pip install" in item]
    assert 'cluster/install.sh --accelerator "$ACCELERATOR" --environment /opt/privmix --no-project' in dockerfile
    assert all("--no-deps --no-build-isolation ." in item for item in installed)


def test_the_image_runs_as_the_user_of_the_manifests(dockerfile: str, manifests: Manifests) -> None:
    *_, user = arguments(dockerfile, "USER")
    for pod in manifests.pods():
        context = pod["spec"]["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_the_base_image_is_named_by_version_and_digest(dockerfile: str) -> None:
    (python,) = re.findall(r"^ARG PYTHON=(\S+)$", dockerfile, re.MULTILINE)
    assert re.fullmatch(r"3\.11\.\d+-[a-z-]+@sha256:[0-9a-f]{64}", python)
    assert {item.split()[0] for item in arguments(dockerfile, "FROM")} == {"python:${PYTHON}"}


def test_what_is_copied_is_there_and_nothing_else_is_sent(dockerfile: str) -> None:
    copied = [
        source
        for item in arguments(dockerfile, "COPY")
        if not item.startswith("--from")
        for source in item.split()[:-1]
    ]
    sent = {line[1:] for line in (K8S / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {Path(source).parts[0] for source in copied} == sent
    assert all((REPOSITORY / source).exists() for source in copied)


@pytest.mark.slow
def test_the_installation_contains_the_whole_project(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("cluster", "services"):
        shutil.copytree(REPOSITORY / folder, source / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(installed), str(source)], check=True)
    roots = (source / "services", source / "cluster")
    files = [file.relative_to(root) for root in roots for file in root.glob("privmix*/**/*.*") if file.suffix != ".md"]
    assert files and not [file for file in files if not (installed / file).exists()]
