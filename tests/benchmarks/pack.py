"""Packs what `tests.benchmarks.gpu` needs on a machine without vLLM or a network.

    python -m tests.benchmarks.pack FOLDER --before COMMIT

The machine has a Hopper GPU (H100, H200), Python 3.12, and PyTorch, Triton, transformers and PEFT. The program writes

- `site.tar.xz`, a folder of packages: vLLM of `cluster/requirements.gpu.lock`, with the kernels that a dense model runs
  on Hopper, and of these only the code for Hopper; the packages that vLLM and privmix import and the machine lacks; and
  in the place of OpenDP, which is larger than the rest together, a package that refuses to draw noise.
- `before.tar.xz` with `--before COMMIT`: that commit's engine, for `tests.benchmarks.gpu --before`.

This uses them, in the root of the repository:

    mkdir -p $SITE && tar -xJf FOLDER/site.tar.xz -C $SITE
    PYTHONPATH=$SITE:services:cluster:. python3 -m tests.benchmarks.gpu
"""

import io
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from tests.benchmarks.fat_binary import keep_architecture

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "cluster" / "requirements.gpu.lock"
PYTHON = "3.12"
GLIBC = range(5, 40)
"""The minor versions of glibc, in the names of platforms, that the machine's wheels may ask for."""
HOPPER = 90
DICTIONARY = 192 * 2**20
"""The bytes in which xz looks for repetitions. The kernels of one library resemble each other over all its length."""

WITH_DEVICE_CODE = ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
LIBRARIES = (*WITH_DEVICE_CODE, *(f"vllm/{name}.abi3.so" for name in ("cumem_allocator", "fs_io_C", "spinloop")))
"""Those of dense models on Hopper. vLLM imports its others, of experts and other devices, where they are present."""
OTHER_KERNELS = tuple(f"vllm/third_party/{name}/" for name in ("deep_gemm", "fmha_sm100", "tml_fa4"))
SUFFIXES = (".py", ".json")

LACKING = (
    "annotated-types",
    "apache-tvm-ffi",
    "blake3",
    "cachetools",
    "cbor2",
    "compressed-tensors",
    "dill",
    "dp-accounting",
    "email-validator",
    "fastapi",
    "h2",
    "hpack",
    "httpcore2",
    "httpx2",
    "hyperframe",
    "jsonschema",
    "jsonschema-specifications",
    "llguidance",
    "loguru",
    "msgspec",
    "numexpr",
    "openai",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "opentelemetry-semantic-conventions-ai",
    "oss-harmony",
    "partial-json-parser",
    "platformdirs",
    "pybase64",
    "pydantic",
    "pydantic-core",
    "pydantic-extra-types",
    "pydantic-settings",
    "python-dotenv",
    "python-multipart",
    "pyzmq",
    "referencing",
    "rpds-py",
    "setproctitle",
    "sniffio",
    "starlette",
    "truststore",
    "typing-inspection",
    "xgrammar",
)
"""The packages that vLLM and privmix import and such a machine lacks."""

NO_NOISE = '''"""Takes the place of OpenDP where nothing draws noise."""


def refuse(*arguments: object, **options: object) -> None:
    raise ImportError("opendp is not installed here, so no noise can be drawn")


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return refuse
'''
NO_OPENDP = {
    "opendp/__init__.py": "",
    **{f"opendp/{module}.py": NO_NOISE for module in ("domains", "measurements", "metrics")},
    "opendp/mod.py": "def enable_features(*names: str) -> None:\n    pass\n",
}


def locked_versions(lock: Path) -> dict[str, str]:
    """Returns the version of each package in a file of requirements."""
    lines = (line.split() for line in lock.read_text().splitlines() if "==" in line)
    return dict(words[0].split("==", 1) for words in lines)


def pip(command: str, names: Iterable[str], *options: str) -> None:
    """Runs a command of pip for packages in their locked versions, without what they need, for the machine's Python.

    Raises:
        KeyError: the file of requirements lacks a package.
        subprocess.CalledProcessError: a package has no wheel for the machine, or the index cannot be reached.
    """
    versions = locked_versions(LOCK)
    packages = [f"{name}=={versions[name]}" for name in names]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    machine = ["--implementation=cp", f"--python-version={PYTHON}", "--platform=manylinux2014_x86_64", *platforms]
    wheels = ["-qq", "--no-deps", "--only-binary=:all:", *machine]
    subprocess.run([sys.executable, "-m", "pip", command, *wheels, *options, *packages], check=True)


def lacking_files() -> dict[str, bytes]:
    """Returns the files of the packages that the machine lacks, by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip("install", LACKING, "--no-compile", f"--target={folder}")
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent != folder / "bin"]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def hopper_files() -> dict[str, bytes]:
    """Returns the files of vLLM that a dense model on Hopper needs, by name."""
    with tempfile.TemporaryDirectory() as folder:
        pip("download", ["vllm"], f"--dest={folder}")
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            files = {name: packed.read(name) for name in hopper_names(packed.namelist())}
    for name in WITH_DEVICE_CODE:
        library = bytearray(files[name])
        left = keep_architecture(library, HOPPER)
        print(f"{name}: {left / 1e6:.0f} MB of device code for sm_{HOPPER}", file=sys.stderr)
        files[name] = bytes(library)
    return files


def hopper_names(names: Iterable[str]) -> Iterator[str]:
    """Yields the names of vLLM's files that a dense model on Hopper needs."""
    for name in names:
        needed = name in LIBRARIES or name.endswith(SUFFIXES) or ".dist-info/" in name
        if needed and not name.startswith(OTHER_KERNELS):
            yield name


def write_archive(path: Path, files: Mapping[str, bytes]) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": lzma.PRESET_DEFAULT, "dict_size": DICTIONARY}]
    with lzma.open(path, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_commit(path: Path, commit: str) -> None:
    """Writes the code of another commit that an engine consists of."""
    names = ("services", "cluster/privmix_cluster/__init__.py", "cluster/privmix_cluster/options.py")
    command = ["git", "-C", str(ROOT), "archive", commit, *names]
    path.write_bytes(lzma.compress(subprocess.run(command, check=True, capture_output=True).stdout))


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write the files; made if needed.")],
    before: Annotated[str | None, typer.Option(help="A commit whose engine is measured beside this one.")] = None,
) -> None:
    """Writes the files of this module's description, in some minutes. Downloads some 350 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    if before is not None:
        write_commit(folder / "before.tar.xz", before)
    no_opendp = {name: text.encode() for name, text in NO_OPENDP.items()}
    write_archive(folder / "site.tar.xz", {**lacking_files(), **no_opendp, **hopper_files()})
    for path in sorted(folder.glob("*.tar.xz")):
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    typer.run(main)
