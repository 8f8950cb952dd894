"""Describes the base model on which adapters are trained, as the manifest records it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privmix.foundation.errors import InputError
from privmix.tokenization.tokenizer import load_tokenizer
from privmix.training import public_model
from privmix.training.manifest import PrivateBase, private_base
from privmix.training.options import TrainingOptions
from privmix.training.private_base import is_trained, merged


@dataclass(frozen=True)
class Base:
    """Identifies a base model: its name as given, its directory, and digests of its weights and its tokenizer.

    See `public_model.revision` and `public_model.tokenizer_hash`.

    Attributes:
        layers: the number of its layers.
        private: how it was trained on private text; None for a public model.
    """

    name: str
    path: Path
    revision: str
    tokenizer: str
    layers: int
    private: PrivateBase | None

    def load_tokenizer(self) -> Any:
        return load_tokenizer(self.path)


def find_base(model: str | None, options: TrainingOptions) -> Base:
    """Finds the model with a name (see `public_model.resolve`) and checks that it can be trained with these options.

    The name of a directory that `privmix train-base` wrote is that of its private base.

    Raises:
        InputError: a block is longer than the model's context, the model lacks modules to adapt or does not exist
            (`PublicModelError`), or it was trained on private text without a guarantee.
    """
    if model and is_trained(directory := Path(model).expanduser()):
        model = str(merged(directory))
    from transformers import AutoConfig

    path = public_model.resolve(model)
    config = AutoConfig.from_pretrained(path).get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and options.block > context:
        raise InputError(f"block: {options.block} tokens are more than the model's context of {context}")
    name = str(path) if model and Path(model).expanduser().is_dir() else model or public_model.DEFAULT
    if name != public_model.DEFAULT and options.part_kind != "text":
        import torch
        from transformers import AutoModelForCausalLM

        from privmix.training.adapter import check_changeable

        with torch.device("meta"):  # a model without its weights takes no time to make
            check_changeable(AutoModelForCausalLM.from_config(config), name, options)
    digests = public_model.revision(path), public_model.tokenizer_hash(path)
    return Base(name, path, *digests, config.num_hidden_layers, private_base(path))
