"""Claim: floats that tests compare to the last bit are equal with every set of kernels that this processor can run.

PyTorch, and the compiled passes, choose their kernels by the processor, and divide work among threads.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
MARK = "@pytest.mark." + "exact"
KERNELS = ("default", "avx2", "avx512")
STATED = "import torch; print(torch.backends.cpu.get_cpu_capability().lower(), torch.get_num_threads())"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kernels", KERNELS)
def test_equal_floats_are_equal_with_each_set_of_kernels(kernels: str, threads: int) -> None:
    own = torch.backends.cpu.get_cpu_capability().lower()
    if own not in KERNELS or KERNELS.index(kernels) > KERNELS.index(own):
        pytest.skip(f"this processor has no {kernels}")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": kernels, "OMP_NUM_THREADS": str(threads)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)

    assert run("-c", STATED).stdout.split() == [kernels, str(threads)]
    # Only these files are collected: importing all would take longer than the tests.
    marked = [str(path) for path in sorted(Path(__file__).parent.rglob("test_*.py")) if MARK in path.read_text()]
    tests = run("-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "exact and not slow", *marked)
    assert tests.returncode == 0, tests.stdout[-10_000:] + tests.stderr[-2_000:]
    assert " passed" in tests.stdout
