"""Writes test ensembles in seconds: real PEFT adapters with large random weights on the real public model.

The functions import torch, PEFT and transformers, which take seconds that many a process does not need.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from privmix.training.manifest import Adapter, Manifest, Part, hash_adapter
from privmix.training.options import READER_TARGETS, TrainingOptions
from privmix.training.partition import Partition, PartShare
from privmix.training.public_model import resolve, revision, tokenizer_hash

RANK = 4
STRENGTH = 0.03
"""The standard deviation of the second LoRA factor, with which adapters differ by far more than rounding errors."""


def write_adapters(
    folder: Path,
    names: Sequence[str],
    model: Path,
    distinct: int | None = None,
    layers: int | None = None,
    targets: Sequence[str] = READER_TARGETS,
    **lora: Any,
) -> dict[str, Path]:
    """Writes adapters whose distributions differ from the public model's and from each other.

    Args:
        distinct: the number of different adapters. The others are links to their files, which is 100 times faster.
        layers: the number of last layers that they change; by default all.
        targets: the modules that they change.
        lora: other fields of PEFT's configuration.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    depth = base.config.num_hidden_layers
    changed = None if layers is None else list(range(depth - layers, depth))
    config = LoraConfig(
        **{"r": RANK, "lora_alpha": 32, "target_modules": list(targets), "layers_to_transform": changed, **lora}
    )
    wrapped = get_peft_model(base, config)
    for seed, name in enumerate(names[:distinct]):
        generator = torch.Generator().manual_seed(seed)
        for key, weights in wrapped.named_parameters():
            if "lora_A" in key:
                torch.nn.init.kaiming_uniform_(weights, a=5**0.5, generator=generator)
            if "lora_B" in key:
                torch.nn.init.normal_(weights, std=STRENGTH, generator=generator)
        wrapped.save_pretrained(folder / name)
    made = names[:distinct]
    for index, name in enumerate(names[len(made) :]):
        shutil.copytree(folder / made[index % len(made)], folder / name, copy_function=os.link)
    return {name: folder / name for name in names}


def usual_layers(model: Path) -> int | None:
    """Returns the number of layers that `privmix train` changes by default."""
    from transformers import AutoConfig

    depth = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
    return TrainingOptions().for_depth(depth).layers


def write_ensemble(
    folder: Path,
    parts: int,
    halves: bool = False,
    distinct: int | None = None,
    layers: int | None = None,
    model: Path | None = None,
) -> Path:
    """Writes an ensemble's directory with its manifest. The parts are the same with and without `halves`.

    Args:
        distinct, layers: see `write_adapters`.
        model: the base model; by default the embedded one.
    """
    model = model or resolve()
    shares = Partition(b"", parts, halves).shares
    write_adapters(folder / "parts", [share.name for share in shares], model, distinct, layers)
    return write_manifest(folder, parts, model, halves)


def write_manifest(folder: Path, parts: int, model: Path, halves: bool = False) -> Path:
    """Writes the manifest of an ensemble whose adapters are there."""
    manifest = Manifest(
        ensemble=f"test-{folder.name}",
        base_model=str(model),
        base_revision=revision(model),
        tokenizer=tokenizer_hash(model),
        salt_id="test",
        part_kind="reader",
        parts=tuple(_part(folder, index, halves) for index in range(parts)),
    )
    manifest.save(folder)
    return folder


def _part(folder: Path, index: int, halves: bool) -> Part:
    pair = (_adapter(folder, PartShare(index, 0)), _adapter(folder, PartShare(index, 1))) if halves else None
    return Part(index=index, halves=pair, **dict(_adapter(folder, PartShare(index))))


def _adapter(folder: Path, share: PartShare) -> Adapter:
    path = f"parts/{share.name}"
    return Adapter(name=share.name, path=path, sha256=hash_adapter(folder / path))
