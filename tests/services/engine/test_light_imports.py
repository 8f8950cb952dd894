"""Claim: an engine on a CPU is imported without what it never uses, and afterwards others can import all of it."""

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from privmix.engine import light_imports
from privmix.engine.light_imports import MISSING, NAMED, UNUSED
from tests.tiny import write_tiny_llama

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="on a GPU everything is imported")

IMPORTED = """
import importlib, sys
from pathlib import Path
from privmix.engine.light_imports import NAMED
import privmix.engine.vllm_engine
from privmix.engine.engine import EngineSettings, create
engine = create(EngineSettings(Path(sys.argv[1]), "vllm", "float32", 128, cache_gib=1))
print(*sys.modules)
for name, member in NAMED.items():
    assert getattr(importlib.import_module(name), member).__module__ == name
"""


def test_within_the_block_modules_are_missing_and_after_it_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import utils
    from transformers.utils import import_utils

    monkeypatch.setattr(light_imports, "MISSING", ("wave",))
    monkeypatch.setattr(light_imports, "NAMED", {"no.such.module": "Member"})
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    before = [getattr(asked, name) for asked in (utils, import_utils) for name in UNUSED]
    with pytest.raises(KeyError, match="an import that fails"), light_imports.light_imports():
        with pytest.raises(ImportError):
            importlib.import_module("wave")
        assert importlib.import_module("no.such.module").Member
        assert not gc.isenabled()
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
        os.environ["SET_BY_AN_IMPORT"] = "1"
        assert not utils.is_sklearn_available()
        raise KeyError("an import that fails")
    assert importlib.import_module("wave").open
    assert "no.such.module" not in sys.modules
    assert gc.isenabled()
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    assert os.environ.pop("SET_BY_AN_IMPORT") == "1"
    assert [getattr(asked, name) for asked in (utils, import_utils) for name in UNUSED] == before


def test_what_is_imported_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light_imports, "MISSING", ("json",))
    with light_imports.light_imports():
        assert importlib.import_module("json").loads("1") == 1
    assert "json" in sys.modules


@pytest.mark.slow
def test_an_engine_imports_nothing_that_it_never_uses(tmp_path: Path) -> None:
    """Afterwards others find the real modules: only the classes that it has named so far are others."""
    model = write_tiny_llama(tmp_path / "model", layers=2, context=128)
    command = [sys.executable, "-c", IMPORTED, str(model)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(listed.stdout.split())
    assert {"privmix.engine.cpu_reader_worker", "vllm.model_executor.models.llama", "transformers"} <= imported
    unused = {"scipy", "sklearn", "pandas", "openai", "compressed_tensors", "vllm.parser", "vllm.renderers.hf"}
    assert not {*MISSING, *NAMED, *unused} & imported
