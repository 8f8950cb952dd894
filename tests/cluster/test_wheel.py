"""Claim: the wheel runs from its metadata alone, and without extras it trains an ensemble and serves it."""

import importlib.metadata as metadata
import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from privmix.foundation.errors import EXTRAS
from tests.running import configure, running
from tests.tiny import write_tiny_model

REPOSITORY = Path(__file__).parents[2]
IMPORT_EVERYTHING = """
import importlib, pkgutil
import privmix
for module in pkgutil.walk_packages(privmix.__path__, "privmix."):
    if module.name != "privmix.__main__":  # runs the command
        importlib.import_module(module.name)
print("imported from", privmix.__file__)
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
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("cluster", "services"):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
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
    assert '"pmixed"' in run(python, "-m", "privmix", "protocols", "--json")
    for name in ("cluster", "services"):  # so they collide with no other project's
        assert run(python, "-c", f"from importlib.util import find_spec; print(find_spec({name!r}))") == "None\n"


@pytest.mark.slow
def test_the_wheel_without_extras_trains_and_serves(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Ray's workers import from the driver's directory, too
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = install(wheel, tmp_path / "bare")
    for module in EXTRAS.keys() - {"pandas"}:  # the package datasets needs pandas
        assert run(python, "-c", f"from importlib.util import find_spec; print(find_spec({module!r}))") == "None\n"
    corpus = tmp_path / "corpus.jsonl"
    lines = (json.dumps({"user": f"u{user}", "text": f"Person {user} called. " * 40}) for user in range(16))
    corpus.write_text("\n".join(lines))
    model, ensemble = write_tiny_model(tmp_path / "tiny"), tmp_path / "ensemble"
    options = ("--parts", "2", "--epochs", "1", "--block", "64")
    run(python, "-m", "privmix", "train", str(corpus), "--output", str(ensemble), "--model", str(model), *options)
    engine = {"kind": "transformers", "context_length": 96}
    config = configure(tmp_path, ensemble, engine=engine, http={"max_tokens": 8})
    with running(config, [str(python), "-I", "-m", "privmix"]) as service:
        url, request = f"{service.base_url}/v1/completions", {"model": "privmix", "prompt": "Person", "max_tokens": 4}
        completion = httpx.post(url, json=request, timeout=60).raise_for_status().json()
    assert completion["usage"]["completion_tokens"] == 4
    refused = subprocess.run([python, "-I", "-m", "privmix", "heads", "compare"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "which is not installed: pip install 'privmix[" in refused.stderr
