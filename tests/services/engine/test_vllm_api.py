"""Claim: the names, signatures and buffers of vLLM that the engine uses are the reviewed ones (`vllm_api.json`)."""

import ast
from pathlib import Path

import pytest

import privmix.engine
from privmix.engine.reader_rows import ReaderRows
from tests.services.engine.vllm_api import USED, differences, installed

pytest.importorskip("vllm")


def test_the_installed_vllm_has_the_reviewed_signatures() -> None:
    assert differences(installed()) == []


def test_a_change_is_found(tmp_path: Path) -> None:
    """A buffer of another type, a method with another argument, and a file that is gone."""
    runner = "v1/worker/gpu_model_runner.py"
    source = (installed() / runner).read_text()
    changed = source.replace(
        "def _prepare_padding_mask(\n        self,", "def _prepare_padding_mask(\n        self, more,"
    )
    changed = changed.replace("self.positions = torch.zeros(", "self.positions = torch.empty(")
    assert changed != source
    (tmp_path / runner).parent.mkdir(parents=True)
    (tmp_path / runner).write_text(changed)
    found = differences(tmp_path)
    assert sum(len(names) for file, names in USED.items() if file != runner) == len(found) - 2
    assert [line.split(": ")[1] for line in found if line.startswith(runner)] == [
        "GPUModelRunner._prepare_padding_mask",
        "GPUModelRunner.positions",
    ]


def test_the_table_has_every_name_that_the_engine_imports_or_overrides() -> None:
    known = {part for names in USED.values() for name in names for part in name.split(".")}
    imported = set()
    for path in Path(privmix.engine.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm"):
                imported |= {name.name for name in node.names}
    # Two instances, of `Platform` and of `_ModelRegistry`.
    assert imported - known == {"current_platform", "ModelRegistry"}
    overridden = {"load_model", "execute_model", "_prepare_inputs", "_preprocess", "set_active_loras", "_model_forward"}
    assert overridden <= set(vars(ReaderRows))
    assert overridden <= known
