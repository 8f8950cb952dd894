"""Builds C++ files of torch operators for the CPU, and loads them.

A build takes some ten seconds, once for a machine, a version of torch and of the file: torch's folder of extensions
(`TORCH_EXTENSIONS_DIR`) keeps the library.
"""

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}
"""The compiler's flags for the vector instructions that torch uses on this machine."""

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
    from torch.utils import cpp_extension  # imports setuptools

    flags = ["-O3", "-fopenmp", *FLAGS.get(torch.backends.cpu.get_cpu_capability(), [])]
    key = hashlib.sha256(repr((torch.__version__, flags, source.read_text())).encode()).hexdigest()[:16]
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    library = root / f"privmix-{key}.so"
    root.mkdir(parents=True, exist_ok=True)
    # The system releases this lock when its process ends. Torch's own lock is a file that a killed process leaves.
    with FileLock(library.with_suffix(".lock")):
        if library.exists():
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
            return
        with tempfile.TemporaryDirectory(dir=root) as folder, _scripts_on_path():
            cpp_extension.load(
                f"privmix_{source.stem}",
                [str(source)],
                extra_cflags=flags,
                build_directory=folder,
                is_python_module=False,
            )
            (built,) = Path(folder).glob("*.so")
            built.replace(library)


@contextmanager
def _scripts_on_path() -> Iterator[None]:
    """Lets torch find ninja, which is installed beside the interpreter."""
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), path])
    try:
        yield
    finally:
        os.environ["PATH"] = path
