"""Makes an ensemble of plain LoRA adapters that PEFT trained elsewhere, one adapter a part.

It checks that the engines run the adapters as PEFT does. It cannot check their training (`budget.sentence.IMPORTED`).
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from privmix.engine.adapter_config import ADAPTER_FILES, WEIGHTS_FILE, AdapterConfig, read_adapter_configs
from privmix.foundation.errors import InputError
from privmix.foundation.files import only_writer, sha256
from privmix.tokenization.tokenizer import load_tokenizer
from privmix.training import manifest as manifests
from privmix.training.base import Base, find_base
from privmix.training.directory import adapter_path, remove_others, store
from privmix.training.manifest import Adapter, Manifest, Part, hash_adapter
from privmix.training.options import TrainingOptions
from privmix.training.partition import PartShare
from privmix.training.plan import manifest_of


def import_adapters(directories: Sequence[Path], output: Path, model: str | None = None) -> Manifest:
    """Copies adapters into a directory and writes its manifest, with the parts in the given order.

    Args:
        model: see `public_model.resolve`; by default the model that the adapters name.

    Raises:
        InputError: an adapter is missing, occurs twice, or would run differently than it was trained; or `output` has
            an ensemble that was trained there.
        WorkError: another process writes to `output`.
    """
    for file in (directory / name for directory in directories for name in ADAPTER_FILES):
        if not file.is_file():
            raise InputError(f"adapter {file.parent}: has no {file.name}; save it with PEFT's `save_pretrained`")
    digests = [hash_adapter(directory) for directory in directories]
    if len({sha256(directory / WEIGHTS_FILE) for directory in directories}) < len(directories):
        raise InputError("adapters: two parts have the same weights; name each adapter once")
    try:
        read = read_adapter_configs({str(directory): directory for directory in directories}, "lora")
    except ValueError as error:
        raise InputError(str(error)) from error
    targets = tuple(sorted({target for config in read for target in config.targets}))
    options = TrainingOptions.checked(part_kind="lora", targets=targets, block=2)
    base = find_base(model or _named_base(read), options)
    _check_weights(base, directories, read)
    _check_vocabularies(base, directories)
    with only_writer(output, "training"):
        if (output / manifests.FILE).exists() and not Manifest.load(output).imported:
            raise InputError(f"output {output}: has an ensemble that was trained there; choose another directory")
        parts = tuple(
            _part(index, directory, digest, output)
            for index, (directory, digest) in enumerate(zip(directories, digests, strict=True))
        )
        of_all = hashlib.sha256("".join(digests).encode()).hexdigest()
        salt_id = f"imported {of_all[:16]}"  # other adapters, other users
        manifest = manifest_of(output, base, salt_id, options, parts, imported=True)
        manifest.save(output)
        remove_others(output, manifest)
    return manifest


def _named_base(configs: Sequence[AdapterConfig]) -> str:
    named = {(config.base_model_name_or_path, config.revision) for config in configs}
    name, revision = named.pop()
    if named or not name or revision not in (None, "main"):
        raise InputError(
            "model: the adapters do not name one base model, in its main revision; say with --model what all were "
            "trained on"
        )
    return name


def _check_weights(base: Base, directories: Sequence[Path], configs: Sequence[AdapterConfig]) -> None:
    """Raises InputError if an adapter holds other weights than PEFT makes for it on the base model."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    expected: dict[str, dict[str, Any]] = {}
    for directory, config in zip(directories, configs, strict=True):
        if (key := config.model_dump_json()) not in expected:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base.path))
                try:
                    adapted = get_peft_model(model, LoraConfig.from_pretrained(str(directory)))
                except Exception as error:  # such as that of a regular expression
                    raise InputError(f"adapter {directory}: PEFT cannot make it on {base.name}: {error}") from error
            state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
            expected[key] = {name: weight.shape for name, weight in state.items()}
        try:
            weights = load_file(directory / WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise InputError(f"adapter {directory}: its weights are damaged; save it again") from error
        shapes = {name: weight.shape for name, weight in weights.items()}
        if different := sorted(name for name, _ in shapes.items() ^ expected[key].items()):
            raise InputError(
                f"adapter {directory}: {different[0]} is not what PEFT makes on {base.name}; name with --model the "
                "model that it was trained on, and save neither embeddings nor other modules"
            )
        if not all(weight.is_floating_point() and bool(weight.float().isfinite().all()) for weight in weights.values()):
            raise InputError(f"adapter {directory}: its weights are not finite numbers; train it again")


def _check_vocabularies(base: Base, directories: Sequence[Path]) -> None:
    """Raises InputError if a tokenizer was saved beside an adapter and has other tokens than the base model's."""
    own = base.load_tokenizer().get_vocab()
    for directory in directories:
        if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            continue
        try:
            same = load_tokenizer(directory).get_vocab() == own
        except Exception as error:  # each format has its own errors
            raise InputError(f"adapter {directory}: its tokenizer is damaged; remove it, or save it again") from error
        if not same:
            raise InputError(
                f"adapter {directory}: its tokenizer has other tokens than that of {base.name}; train it with that one"
            )


def _part(index: int, directory: Path, digest: str, output: Path) -> Part:
    """Copies an adapter into the ensemble's directory."""
    name = PartShare(index).name
    path = adapter_path(name, digest)
    store(output / path, digest, {file: (directory / file).read_bytes() for file in ADAPTER_FILES})
    if hash_adapter(output / path) != digest:
        raise InputError(f"adapter {directory}: was changed meanwhile; import it again")
    return Part(index=index, **dict(Adapter(name=name, path=path, sha256=digest)))
