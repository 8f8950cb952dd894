"""Claim: the engines are correct on a GPU: `pytest -m gpu`. Without a GPU, the tests skip with a reason.

vLLM chooses its kernels when it is imported, so every engine runs in its own process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(3600),  # every engine compiles: the first start took 102 s on an H200
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU is here"),
]


@pytest.fixture(scope="module")
def measured() -> Any:
    stages = [f"--stage={stage}" for stage in ("exact", "batches")]
    command = [sys.executable, "-m", "tests.benchmarks.gpu", *stages, "--limit-s", "1800", "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


@pytest.mark.parametrize("invariant", ["1", "0"])
def test_every_engine_agrees_with_a_plain_forward_pass(invariant: str) -> None:
    environment = {**os.environ, "VLLM_BATCH_INVARIANT": invariant}
    command = [sys.executable, "-m", "pytest", "--quiet", "--exitfirst", "tests/services/engine/test_conformance.py"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def test_a_captured_step_has_the_bits_of_its_code(measured: Any) -> None:
    cells = [cell for cell in measured["exact"]["replays"].values() if isinstance(cell, dict)]
    assert sum(cell["rows"] for cell in cells) > 1000
    assert [cell["rows_that_differ"] for cell in cells] == [0] * len(cells)


def test_a_row_has_the_same_bits_in_every_batch(measured: Any) -> None:
    found = measured["batches"]["invariant"]
    assert found["rows_compared"] > 100
    assert found["rows_that_differ"] == 0
