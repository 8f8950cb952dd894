"""Reads `adapter_config.json` and refuses adapters that the engine would run differently than they were trained."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors import safe_open

from privmix.engine import PartKind
from privmix.foundation.options import problem

ADAPTER_FILES = CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""The names of an adapter's files, as PEFT and vLLM expect them."""
KEYS_AND_VALUES = ("k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv")
ROW_PARALLEL = ("o_proj", "down_proj")
"""The modules whose inputs vLLM splits over devices. Of all others it splits the outputs."""
HEAD_AND_EMBEDDING = ("lm_head", "embed_out", "embed_tokens", "wte")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of vLLM's adapter slots."""

SILENT = frozenset(
    {
        *("auto_mapping", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "loftq_config"),
        *("lora_dropout", "megatron_core", "peft_version", "qalora_group_size"),
    }
)
"""The other fields of PEFT's `LoraConfig` that say nothing to a trained adapter or to who has its weights."""

Rank = Annotated[int, Field(ge=1, le=LORA_RANKS[-1])]


class AdapterConfig(BaseModel):
    """Holds the fields of PEFT's `LoraConfig`, with the values that both engines run as PEFT does.

    Values are checked without conversion, because PEFT and vLLM read the same file.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    base_model_name_or_path: str | None = None
    revision: str | None = None
    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    r: Rank
    lora_alpha: FiniteFloat
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, FiniteFloat] | None = None
    target_modules: list[str] = Field(min_length=1)
    # PEFT 0.21 writes an empty list for a mixture of experts, and targets nothing by it.
    target_parameters: Annotated[list[str], Field(max_length=0)] | None = None
    layers_to_transform: int | list[int] | None = None
    bias: Literal["none"] = "none"
    init_lora_weights: Literal["gaussian"] | bool | None = Field(
        default=True, description="others change the weights of the base model"
    )

    @property
    def rank(self) -> int:
        """The highest rank."""
        return max([self.r, *(self.rank_pattern or {}).values()])

    @property
    def targets(self) -> tuple[str, ...]:
        """The last names of the target modules, which PEFT also finds by their full names."""
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in self.target_modules))

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The layers that it changes; None for all."""
        layers = self.layers_to_transform
        return None if layers is None else tuple(sorted([layers] if isinstance(layers, int) else layers))


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
    with safe_open(path / WEIGHTS_FILE, "pt") as weights:
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
    with safe_open(path / WEIGHTS_FILE, "pt") as weights:
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


def width_of_keys(model: Any, devices: int) -> int:
    """Returns the width of the keys of a token in one layer on each device.

    Args:
        model: the configuration of the base model.
    """
    heads = model.num_attention_heads
    head_size = getattr(model, "head_dim", None) or model.hidden_size // heads
    return int(head_size * max(1, (getattr(model, "num_key_value_heads", None) or heads) // devices))


def _read(name: str, path: Path, part_kind: PartKind) -> AdapterConfig:
    try:
        config = AdapterConfig.model_validate_json((path / CONFIG_FILE).read_bytes())
    except ValidationError as error:
        raise ValueError(f"adapter {name!r}, {CONFIG_FILE}: {problem(error)}") from error
    if head := _matching(config.targets, HEAD_AND_EMBEDDING):
        raise ValueError(
            f"adapter {name!r} changes {head}; adapters share the head and the embedding of the base model"
        )
    if part_kind == "reader" and (changed := _matching(config.targets, KEYS_AND_VALUES)):
        raise ValueError(
            f"adapter {name!r} changes {changed}, but a reader attends to the public model's keys and values; train it "
            "again with `privmix train`"
        )
    for field, value in sorted((config.model_extra or {}).items()):
        if field not in SILENT and value not in (None, False):
            raise ValueError(f"adapter {name!r}: {field}: {value!r} is not supported; train it without (null)")
    return config


def _matching(targets: Sequence[str], names: Sequence[str]) -> str:
    return ", ".join(sorted({*targets} & {*names}))
