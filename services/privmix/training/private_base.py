"""Makes a base model from a model that DP-SGD trained, so that an ensemble can be trained on it.

    path = merged(Path("trained-with-dp-sgd"))    # a Hugging Face model directory
    manifest.private_base(path)                   # the training that it must be charged for

The adapter is merged into the weights of the public model. `config.json` states the training. Every command that loads
the model reads it there, and a copy of the directory that transformers writes keeps it.
"""

import json
import shutil
from pathlib import Path

from filelock import FileLock

from privmix.foundation.errors import InputError
from privmix.foundation.files import building
from privmix.training import public_model
from privmix.training.manifest import FILE, PRIVATE_BASE, Manifest, PrivateBase

_COPIED = (".json", ".txt", ".model", ".jinja")


def is_trained(directory: Path) -> bool:
    """Returns whether `privmix train` wrote this directory."""
    return (directory / FILE).is_file()


def merged(directory: Path) -> Path:
    """Returns the base model of the ensemble in `directory`, which is written on first use.

    A base model never changes: another training of the same directory makes another one.

    Raises:
        InputError: the ensemble was not trained with DP-SGD, or differs from its manifest.
    """
    manifest = Manifest.load(directory)
    training = manifest.dp_sgd
    if training is None:
        raise InputError(
            f"model {directory}: was trained on private text without a guarantee, so it can be no base; train a base "
            "with `privmix train-base`"
        )
    manifest.verify(directory)
    adapter = manifest.parts[0]
    target = (directory / f"base-{adapter.sha256[:12]}").resolve()
    with FileLock(directory / ".base.lock"):
        if not target.is_dir():
            origin = public_model.resolve(manifest.base_model)
            described = PrivateBase(
                origin=manifest.base_revision,
                adapter=adapter.sha256,
                training=training,
            )
            with building(target) as unfinished:
                merge_adapter(origin, directory / adapter.path, unfinished)
                _complete(origin, unfinished, described)
    return target


def merge_adapter(origin: Path, adapter: Path, target: Path) -> None:
    """Writes the weights and the configuration of the public model with an adapter merged into them."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(origin, dtype="auto")
    kept = model.dtype
    # A sum in float32 rounds the change of a weight once.
    adapted = PeftModel.from_pretrained(model.to(torch.float32), adapter)
    adapted.merge_and_unload().to(kept).save_pretrained(target)


def _complete(origin: Path, target: Path, described: PrivateBase) -> None:
    """Copies the tokenizer and states the training in the configuration."""
    for file in origin.iterdir():
        if file.suffix in _COPIED and not file.name.endswith(".index.json") and not (target / file.name).exists():
            shutil.copy(file, target)
    config = json.loads((origin / "config.json").read_bytes())
    config[PRIVATE_BASE] = described.model_dump(mode="json")
    (target / "config.json").write_text(json.dumps(config, indent=2))
