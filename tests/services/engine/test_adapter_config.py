"""Claim: the engine refuses, with the fix, an adapter that it would run differently from its training."""

import json
from pathlib import Path
from typing import Any

import pytest

from privmix.engine.adapter_config import first_layer, read_adapter_configs
from privmix.engine.engine import EngineSettings, create
from tests.ensembles import write_adapters

READER = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": READER}


def write(folder: Path, **changed: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changed))
    return folder


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, "'a' changes v_proj, .* train it again with `privmix train`"),
        ({"target_modules": ["query_key_value"]}, "'a' changes query_key_value"),
        ({"target_modules": [*READER, "lm_head"]}, "'a' changes lm_head"),
        ({"target_modules": [*READER, "model.lm_head"]}, "'a' changes lm_head"),
        ({"target_modules": "all-linear"}, "target_modules: Input should be a valid array"),
        ({"target_modules": [1]}, "target_modules.0: Input should be a valid string"),
        ({"use_dora": True}, "use_dora: True is not supported"),
        ({"alora_invocation_tokens": []}, r"alora_invocation_tokens: \[\] is not supported"),
        ({"bias": "all"}, "bias: Input should be 'none'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights.*: Input should be 'gaussian'"),
        ({"task_type": "SEQ_CLS"}, "task_type: Input should be 'CAUSAL_LM'"),
        ({"lora_alpha": "8"}, "lora_alpha: Input should be a valid number"),
        ({"lora_alpha": 1e999}, "lora_alpha: Input should be a finite number"),
        ({"r": 0}, "r: Input should be greater than or equal to 1"),
        ({"rank_pattern": {"q_proj": 1024}}, "rank_pattern.q_proj: Input should be less than or equal to 512"),
        ({"layers_to_transform": "0"}, "layers_to_transform.*: Input should be a valid integer"),
        ({"a_field_of_tomorrow": 3}, "a_field_of_tomorrow: 3 is not supported"),
    ],
)
def test_an_adapter_that_is_not_a_reader_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_adapter_configs({"a": write(tmp_path / "a", **changed)}, "reader")


def test_plain_lora_has_its_highest_rank_and_the_last_names_of_its_modules(tmp_path: Path) -> None:
    names = ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "v_proj"]
    (config,) = read_adapter_configs({"a": write(tmp_path / "a", target_modules=names, rank_pattern={"v": 6})}, "lora")
    assert (config.rank, config.targets) == (6, ("q_proj", "v_proj"))


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
