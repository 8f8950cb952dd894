"""Makes an ensemble of plain LoRA adapters that PEFT trained elsewhere, one adapter a part.

It checks that the engines run the adapters as PEFT does. It cannot check their training (`budget.sentence.IMPORTED`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from privmix.engine.adapter_config import LORA_RANKS, read_adapter_configs
from privmix.foundation.errors import InputError
from privmix.foundation.files import only_writer, sha256
from privmix.tokenization.tokenizer import load_tokenizer
from privmix.training import manifest as manifests
from privmix.training.base import Base, find_base
from privmix.training.directory import adapter_path, ensemble_id, remove_others, store
from privmix.training.manifest import ADAPTER_FILES, Adapter, Manifest, Part, hash_adapter
from privmix.training.options import TrainingOptions
from privmix.training.partition import PartShare


def import_adapters(directories: Sequence[Path], output: Path, model: str | None = None) -> Manifest:
    """Copies adapters into a directory and writes its manifest, with the parts in the given order.

    Args:
        model: see `public_model.resolve`; by default the model that the adapters name.

    Raises:
        InputError: an adapter is missing, occurs twice, or would run differently than it was trained; or `output` has
            an ensemble that was trained there.
        WorkError: another process writes to `output`.
    """
    configs = {directory: _config(directory) for directory in directories}
    weights = {sha256(directory / ADAPTER_FILES[1]): directory for directory in directories}
    if len(weights) < len(directories):
        raise InputError("adapters: two parts have the same weights; name each adapter once")
    try:
        read = read_adapter_configs({str(directory): directory for directory in directories}, "lora")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(str(error)) from error
    if (rank := max(config.rank for config in read)) > LORA_RANKS[-1]:
        raise InputError(f"adapters: rank {rank} is above {LORA_RANKS[-1]}, the highest that is served")
    targets = tuple(sorted({target.rpartition(".")[2] for config in read for target in config.targets}))
    options = TrainingOptions.checked(part_kind="lora", targets=targets, block=2)
    base = find_base(model or _named_base(configs), options)
    _check_weights(base, configs)
    _check_vocabularies(base, directories)
    with only_writer(output, "training"):
        if (output / manifests.FILE).exists() and not Manifest.load(output).imported:
            raise InputError(f"output {output}: has an ensemble that was trained there; choose another directory")
        parts = tuple(_part(index, directory, output) for index, directory in enumerate(directories))
        digests = "".join(part.sha256 for part in parts)
        manifest = Manifest(
            ensemble=ensemble_id(output),
            base_model=base.name,
            base_revision=base.revision,
            tokenizer=base.tokenizer,
            salt_id=f"imported {hashlib.sha256(digests.encode()).hexdigest()[:16]}",  # other adapters, other users
            part_kind="lora",
            parts=parts,
            imported=True,
            private_base=base.private,
        )
        manifest.save(output)
        remove_others(output, manifest)
    return manifest


def _config(directory: Path) -> Mapping[str, Any]:
    """Returns an adapter's configuration."""
    if missing := [name for name in ADAPTER_FILES if not (directory / name).is_file()]:
        raise InputError(f"adapter {directory}: has no {missing[0]}; save it with PEFT's `save_pretrained`")
    try:
        config = json.loads((directory / ADAPTER_FILES[0]).read_bytes())
        if config["peft_type"] != "LORA":
            raise InputError(f"adapter {directory}: is of the type {config['peft_type']}; only LORA is served")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"adapter {directory}: its {ADAPTER_FILES[0]} is damaged; save it again") from error
    return dict(config)


def _named_base(configs: Mapping[Path, Mapping[str, Any]]) -> str:
    named = {config.get("base_model_name_or_path") for config in configs.values()}
    if len(named) > 1 or not (name := named.pop()):
        raise InputError("model: the adapters do not name one base model; say with --model what all were trained on")
    return str(name)


def _check_weights(base: Base, configs: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raises InputError if an adapter holds other weights than PEFT makes for it on the base model."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    expected: dict[str, dict[str, Any]] = {}
    for directory, config in configs.items():
        if (key := json.dumps(config, sort_keys=True)) not in expected:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base.path))
                adapted = get_peft_model(model, LoraConfig.from_pretrained(str(directory)))
            state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
            expected[key] = {name: weight.shape for name, weight in state.items()}
        try:
            weights = load_file(directory / ADAPTER_FILES[1])
        except (OSError, SafetensorError) as error:
            raise InputError(f"adapter {directory}: its weights are damaged; save it again") from error
        shapes = {name: weight.shape for name, weight in weights.items()}
        if different := sorted(name for name, _ in shapes.items() ^ expected[key].items()):
            raise InputError(
                f"adapter {directory}: {different[0]} is not what PEFT makes on {base.name}; name with --model the "
                "model that it was trained on, and save neither embeddings nor other modules"
            )
        if not all(bool(weight.isfinite().all()) for weight in weights.values()):
            raise InputError(f"adapter {directory}: its weights are not finite; train it again")


def _check_vocabularies(base: Base, directories: Sequence[Path]) -> None:
    """Raises InputError if a tokenizer was saved beside an adapter and has other tokens than the base model's."""
    own = base.load_tokenizer().get_vocab()
    for directory in directories:
        if (directory / "tokenizer.json").is_file() and load_tokenizer(directory).get_vocab() != own:
            raise InputError(
                f"adapter {directory}: its tokenizer has other tokens than that of {base.name}; train it with that one"
            )


def _part(index: int, directory: Path, output: Path) -> Part:
    """Copies an adapter into the ensemble's directory."""
    name, digest = PartShare(index).name, hash_adapter(directory)
    path = adapter_path(name, digest)
    store(output / path, digest, {file: (directory / file).read_bytes() for file in ADAPTER_FILES})
    return Part(index=index, **dict(Adapter(name=name, path=path, sha256=digest)))
