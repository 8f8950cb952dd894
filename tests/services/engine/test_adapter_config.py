"""Claim: the engine refuses, with the fix, an adapter that it would run differently from its training."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.adapter_config import AdapterConfig, read_adapter_configs

READER = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(folder: Path, **changed: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": READER} | changed))
    return folder


def test_readers_are_read(tmp_path: Path) -> None:
    adapters = {name: write(tmp_path / name) for name in ("a", "b")}
    assert read_adapter_configs(adapters, "public") == [AdapterConfig(4, READER)] * 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, "'a' changes v_proj, .* train it again with `privmix train`"),
        ({"target_modules": ["query_key_value"]}, "'a' changes query_key_value"),
        ({"target_modules": [*READER, "lm_head"]}, "'a' changes lm_head"),
        ({"target_modules": "all-linear"}, "name the modules in a list"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_an_adapter_that_is_not_a_reader_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_adapter_configs({"a": write(tmp_path / "a", **changed)}, "public")


def test_plain_lora_is_served_alone(tmp_path: Path) -> None:
    plain = {name: write(tmp_path / name, target_modules=["q_proj", "v_proj"]) for name in ("a", "b")}
    assert read_adapter_configs({"a": plain["a"]}, "own") == [AdapterConfig(4, ("q_proj", "v_proj"))]
    with pytest.raises(ValueError, match="'own' serves one adapter, got 2; train the ensemble again"):
        read_adapter_configs(plain, "own")
