"""Builds C++ files of torch operators for the CPU, and loads them.

The files use torch's stable interface alone, whose headers compile in a fraction of the time of its others: a first
start waits for each build. A build is done once for a machine, a version of torch and of the file: torch's folder of
extensions (`TORCH_EXTENSIONS_DIR`) keeps the library.
"""

import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}
"""The compiler's flags for the vector instructions that torch uses on this machine."""
ALWAYS = ["-O3", "-std=c++20", "-fopenmp-simd", "-fPIC", "-shared"]

logger = logging.getLogger(__name__)


@cache
def operators(source: Path) -> Any | None:
    """Returns `torch.ops.privmix` with the operators of a C++ file, which it builds if needed.

    None, and says so in the log, if this machine cannot build it: torch's own operators then do the same, more slowly.
    """
    try:
        _load(source)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%s is not used, so rows take longer: no C++ compiler works here (%s)", source.name, reason)
        return None
    import torch

    return torch.ops.privmix


def _load(source: Path) -> None:
    import torch

    flags = [*ALWAYS, *FLAGS.get(torch.backends.cpu.get_cpu_capability(), [])]
    command = [*shlex.split(os.environ.get("CXX") or "c++"), *flags]
    key = hashlib.sha256(repr((torch.__version__, command, source.read_text())).encode()).hexdigest()[:16]
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or user_cache_path("torch_extensions"))
    library = root / f"privmix-{key}.so"
    root.mkdir(parents=True, exist_ok=True)
    # The system releases this lock when its process ends. Torch's own lock is a file that a killed process leaves.
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            _build(command, source, library)
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


def _build(command: list[str], source: Path, library: Path) -> None:
    """Compiles a file into a library of torch operators.

    Raises:
        OSError: there is no such compiler.
        RuntimeError: it does not compile the file. The message is the compiler's.
    """
    import torch

    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        options = [f"-I{home / 'include'}", str(source), "-o", str(built), f"-L{home / 'lib'}", "-ltorch_cpu"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"the compiler ended with {done.returncode}")
        built.replace(library)
