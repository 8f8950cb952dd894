"""Claim: the engine refuses, with the fix, an adapter that it would run differently from its training."""

import json
from pathlib import Path
from typing import Any

import pytest

from privmix.engine.adapter_config import AdapterConfig, first_layer, read_adapter_configs
from privmix.engine.engine import EngineSettings, create
from tests.ensembles import write_adapters

READER = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(folder: Path, **changed: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": READER} | changed))
    return folder


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, "'a' changes v_proj, .* train it again with `privmix train`"),
        ({"target_modules": ["query_key_value"]}, "'a' changes query_key_value"),
        ({"target_modules": [*READER, "lm_head"]}, "'a' changes lm_head"),
        ({"target_modules": "all-linear"}, "name the modules in a list"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"a_field_of_tomorrow": 3}, "a_field_of_tomorrow"),
    ],
)
def test_an_adapter_that_is_not_a_reader_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_adapter_configs({"a": write(tmp_path / "a", **changed)}, "reader")


def test_plain_lora_has_its_highest_rank(tmp_path: Path) -> None:
    plain = write(tmp_path / "a", target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 6}, use_rslora=True)
    assert read_adapter_configs({"a": plain}, "lora") == [AdapterConfig(6, ("q_proj", "v_proj"))]


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({}, 0),
        *(({"layers_to_transform": own}, first) for own, first in ((None, 0), ([0, 1, 2, 3], 0), ([3, 2], 2), (3, 3))),
    ],
)
def test_readers_fork_at_the_first_layer_that_they_change(tmp_path: Path, changed: dict[str, Any], first: int) -> None:
    adapters = {name: write(tmp_path / name, **changed) for name in ("a", "b")}
    assert first_layer(read_adapter_configs(adapters, "reader"), 4) == first


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (([2, 3], [3]), r"layers: adapters change the last \[1, 2\] layers; train all parts with the same --layers"),
        ((None, [3]), r"layers: adapters change the last \[1, 4\] layers"),
        (([1, 2], [1, 2]), r"layers: adapters change the layers \[1, 2\] of 4 .* must change the last ones"),
        (([1, 3], [1, 3]), r"layers: adapters change the layers \[1, 3\]"),
        (([3, 4], [3, 4]), r"layers: adapters change the layers \[3, 4\] of 4"),
    ],
)
def test_other_layers_are_refused(tmp_path: Path, layers: tuple[Any, Any], message: str) -> None:
    adapters = {
        name: write(tmp_path / name, layers_to_transform=own) for name, own in zip(("a", "b"), layers, strict=True)
    }
    with pytest.raises(ValueError, match=message):
        first_layer(read_adapter_configs(adapters, "reader"), 4)


def test_the_transformers_engine_refuses_them_too(tiny: Path, tmp_path: Path) -> None:
    adapters = write_adapters(tmp_path / "all", ("a",), tiny) | write_adapters(
        tmp_path / "late", ("b",), tiny, layers=1
    )
    with pytest.raises(ValueError, match=r"layers: adapters change the last \[1, 2\] layers"):
        create(EngineSettings(tiny, "transformers", "float32", 64, adapters=adapters))
