"""Claim: the wheel's metadata names every imported package, so it runs without this repository and its locks."""

import importlib.metadata as metadata
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
IMPORT_EVERYTHING = """
import importlib, pkgutil
import cluster, services
for package in (cluster, services):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if ".migrations." not in module.name and module.name != "cluster.__main__":  # run by Alembic; runs the command
            importlib.import_module(module.name)
print("imported from", cluster.__file__)
"""


def required(requirements: list[Requirement], extras: frozenset[str]) -> Iterator[Requirement]:
    """Yields the requirements for this platform and these extras."""
    for requirement in requirements:
        environments = [{"extra": extra} for extra in extras or {""}]
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            yield requirement


def closure(requirements: list[Requirement], extras: frozenset[str]) -> dict[str, metadata.Distribution]:
    """Returns the distributions that pip would install, in their installed versions.

    The locks exclude some requirements on purpose. They are not installed, and imports must work without them.
    """
    found: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}
    waiting = list(required(requirements, extras))
    while waiting:
        requirement = waiting.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in found:
            continue
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        found[key] = distribution
        waiting += required([Requirement(text) for text in distribution.requires or ()], key[1])
    return {name: distribution for (name, _), distribution in found.items()}


def link(distributions: dict[str, metadata.Distribution], target: Path) -> None:
    """Links the files of `distributions`, and of no other, into the folder `target`."""
    owners: dict[str, set[str]] = defaultdict(set)
    for distribution in metadata.distributions():
        for file in distribution.files or ():
            owners[file.parts[0]].add(canonicalize_name(distribution.name))
    for name, distribution in distributions.items():
        for file in distribution.files or ():
            whole = owners[file.parts[0]] == {name}
            place = PurePosixPath(file.parts[0]) if whole else PurePosixPath(file)
            path = target / place
            if file.parts[0] != ".." and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(Path(str(distribution.locate_file(place))))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools would put files of earlier builds in the repository into the wheel
    for name in ("cluster", "services"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    subprocess.run([*build, str(source)], check=True, cwd=folder)
    (built,) = folder.glob("privmix-*.whl")
    return built


def install(wheel: Path, environment: Path, *extras: str) -> Path:
    """Installs the wheel with its extras into a new environment, with links to packages; returns its interpreter."""
    venv.create(environment, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (own,) = metadata.distributions(name="privmix", path=[str(packages)])
    link(closure([Requirement(text) for text in own.requires or ()], frozenset(extras)), packages)
    return environment / "bin" / "python"


def run(python: Path, *arguments: str) -> str:
    """Runs an environment's interpreter, which imports nothing from this repository."""
    ran = subprocess.run([python, "-I", *arguments], cwd=python.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


@pytest.mark.slow
def test_the_wheel_imports_and_runs_from_its_metadata_alone(wheel: Path, tmp_path: Path) -> None:
    python = install(wheel, tmp_path / "fresh", "cpu", "lab", "heads", "postgresql", "demo")
    assert str(tmp_path / "fresh") in run(python, "-c", IMPORT_EVERYTHING)
    assert '"pmixed"' in run(python, "-m", "cluster", "protocols", "--json")
