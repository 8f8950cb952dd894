"""Reads `adapter_config.json` and refuses adapters that the engine would run differently than they were trained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from privmix.engine import PartKind

KEYS_AND_VALUES = ("k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv")
ROW_PARALLEL = ("o_proj", "down_proj")
"""The modules whose inputs vLLM splits over devices. Of all others it splits the outputs."""
HEAD_AND_EMBEDDING = ("lm_head", "embed_out", "embed_tokens", "wte")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of vLLM's adapter slots."""

RUN = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha"),
        *("lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern"),
        *("revision", "target_modules", "task_type", "use_rslora"),
    }
)
"""The fields of PEFT's `LoraConfig` that both engines run as PEFT does, or that say nothing to a trained adapter."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Holds the highest rank, the target modules and the layers of an adapter; `layers` is None if it changes all."""

    rank: int
    targets: tuple[str, ...]
    layers: tuple[int, ...] | None = None


def first_layer(configs: Sequence[AdapterConfig], depth: int) -> int:
    """Returns the first layer that the adapters change, where readers fork from the public model; 0 without adapters.

    Args:
        depth: the number of the model's layers.

    Raises:
        ValueError: the adapters change different layers, or others than the last ones.
    """
    if not configs:
        return 0
    changed = {config.layers for config in configs}
    if len(changed) > 1:
        numbers = sorted(depth if layers is None else len(layers) for layers in changed)
        raise ValueError(f"layers: adapters change the last {numbers} layers; train all parts with the same --layers")
    layers = changed.pop()
    if layers is None:
        return 0
    if not layers or layers != tuple(range(layers[0], depth)):
        raise ValueError(
            f"layers: adapters change the layers {list(layers)} of {depth} (layers_to_transform), but must change the "
            "last ones; train them again with `privmix train --layers`"
        )
    return layers[0]


def read_adapter_configs(adapters: Mapping[str, Path], part_kind: PartKind) -> list[AdapterConfig]:
    """Reads the adapters' configurations, in the order of `adapters`. Texts have none.

    Raises:
        ValueError: the engine would run an adapter differently than it was trained. The message names the adapter and
            the fix.
    """
    return [] if part_kind == "text" else [_read(name, path, part_kind) for name, path in adapters.items()]


def changed_modules(path: Path) -> list[str]:
    """Returns the full names of the modules that the adapter in a directory changes, as its base model names them."""
    with safe_open(path / "adapter_model.safetensors", "pt") as weights:
        keys = list(weights.keys())
    return sorted({key.removeprefix("base_model.model.").partition(".lora_")[0] for key in keys})


def slot_bytes(path: Path, rank: int, itemsize: int, key_width: int, devices: int = 1) -> int:
    """Returns the memory of an adapter slot of vLLM for the adapter in a directory and others of its shapes.

    vLLM's buffers have one rank for all, and a layer that merges modules has buffers for each of them, changed or not.

    Args:
        rank: the rank of vLLM's buffers.
        itemsize: the bytes of a number in the serving type.
        key_width: the width of the keys of a token in one layer on one device, and of its values.
        devices: the number of devices over which vLLM splits the model; the result is the memory on each of them.
    """
    numbers = 0
    with safe_open(path / "adapter_model.safetensors", "pt") as weights:
        for key in weights.keys():  # noqa: SIM118 (no mapping)
            first, second = weights.get_slice(key).get_shape()
            module = key.partition(".lora_")[0].rpartition(".")[2]
            splits_inputs = module in ROW_PARALLEL
            if ".lora_A." in key:
                inputs = second // devices if splits_inputs else second
                numbers += inputs * (3 if module == "q_proj" else 1)
            else:
                outputs = first if splits_inputs else first // devices
                numbers += outputs + (2 * key_width if module == "q_proj" else 0)
    return numbers * rank * itemsize


def _read(name: str, path: Path, part_kind: PartKind) -> AdapterConfig:
    config = json.loads((path / "adapter_config.json").read_text())
    targets = config["target_modules"]
    if not isinstance(targets, Sequence) or isinstance(targets, str):
        raise ValueError(f"adapter {name!r}: target_modules is {targets!r}; name the modules in a list")
    if head := _matching(targets, HEAD_AND_EMBEDDING):
        raise ValueError(
            f"adapter {name!r} changes {head}; adapters share the head and the embedding of the base model"
        )
    if part_kind == "reader" and (changed := _matching(targets, KEYS_AND_VALUES)):
        raise ValueError(
            f"adapter {name!r} changes {changed}, but a reader attends to the public model's keys and values; train it "
            "again with `privmix train`"
        )
    if config.get("init_lora_weights") not in (None, True, False, "gaussian"):  # others change the base model
        raise ValueError(
            f"adapter {name!r}: init_lora_weights is {config['init_lora_weights']!r}; save it as plain LoRA"
        )
    for field in sorted(field for field, value in config.items() if value and field not in RUN):
        if (field, config[field]) != ("bias", "none"):
            raise ValueError(f"adapter {name!r}: {field} is not supported; train it without")
    layers = config.get("layers_to_transform")
    if isinstance(layers, int):
        layers = [layers]
    rank = max(config["r"], *(config.get("rank_pattern") or {}).values(), 0)
    return AdapterConfig(rank, tuple(targets), None if layers is None else tuple(sorted(layers)))


def _matching(targets: Sequence[str], names: Sequence[str]) -> str:
    return ", ".join(sorted({target for target in targets if target.rsplit(".", 1)[-1] in names}))
