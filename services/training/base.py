"""Describes the public model on which adapters are trained, as the manifest records it."""

from dataclasses import dataclass
from pathlib import Path

from services.errors import InputError
from services.training import public_model


@dataclass(frozen=True)
class Base:
    """Identifies a public model: its name as given, its directory, and digests of its weights and its tokenizer.

    See `public_model.revision` and `public_model.tokenizer_hash`.
    """

    name: str
    path: Path
    revision: str
    tokenizer: str


def find_base(model: str | None, block: int) -> Base:
    """Finds the public model with a name (see `public_model.resolve`) and checks that it supports the block size.

    Args:
        block: the number of tokens in a block.

    Raises:
        InputError: a block is longer than the model's context, or the model does not exist (`PublicModelError`).
    """
    path = public_model.resolve(model)
    _check_block(path, block)
    name = str(path) if model and Path(model).expanduser().is_dir() else model or public_model.DEFAULT
    return Base(name, path, public_model.revision(path), public_model.tokenizer_hash(path))


def _check_block(path: Path, block: int) -> None:
    from transformers import AutoConfig

    context = getattr(AutoConfig.from_pretrained(path).get_text_config(), "max_position_embeddings", None)
    if context is not None and block > context:
        raise InputError(f"block: {block} tokens are more than the model's context of {context}")
