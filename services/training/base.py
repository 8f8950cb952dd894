"""The public model that adapters are trained on, with all that a manifest records of it."""

from dataclasses import dataclass
from pathlib import Path

from services.errors import InputError
from services.training import public_model


@dataclass(frozen=True)
class Base:
    """`name` is as it was given, `revision` and `tokenizer` are digests (see `public_model`)."""

    name: str
    path: Path
    revision: str
    tokenizer: str


def find_base(model: str | None, block: int) -> Base:
    """The public model of a name (see `public_model.resolve`), for blocks of so many tokens.

    Raises:
        InputError: a block is longer than the model's context, or there is no such model (`PublicModelError`).
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
