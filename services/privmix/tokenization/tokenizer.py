"""Loads the tokenizer of a Hugging Face model directory, which encodes each text alone.

A checkpoint can have saved padding to the longest text of a batch, truncation, or random merges. With one of them,
one user's text would change the tokens of others, and text would be cut without a word.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from privmix.foundation.errors import InputError

PLAIN = frozenset({"llama"})
"""The model types for which transformers has no class of tokenizers, so that the files alone describe it."""

_SAMPLE = "The clinic on 12 High Street opens at 09:30; naïve questions are welcome, and nobody waits.\n" * 8


def load_tokenizer(model: Path) -> Any:
    """Returns what `AutoTokenizer` loads from a model directory.

    The import of `AutoTokenizer` brings the code that generates text and takes seconds of a processor, in each process
    of a service that reads a tokenizer. A tokenizer that the files describe completely needs a quarter of that.

    Raises:
        OSError, ValueError: the directory has no usable tokenizer.
        InputError: the tokens of a text depend on more than the text.
    """
    tokenizer = _loaded(model)
    if tokenizer.is_fast:
        encode_alone(tokenizer.backend_tokenizer)
        check_alone(tokenizer.backend_tokenizer)
    return tokenizer


def encode_alone(tokenizer: Tokenizer) -> None:
    """Switches off the padding and the truncation that a checkpoint has saved."""
    tokenizer.no_padding()
    tokenizer.no_truncation()


def check_alone(tokenizer: Tokenizer) -> None:
    """Checks that the tokens of a text depend on the text alone: not on other texts, and on nothing random.

    Raises:
        InputError: they do. The message names the field.
    """
    for field in ("dropout", "alpha", "nbest_size"):
        if getattr(tokenizer.model, field, None):
            raise InputError(f"tokenizer.json, model.{field}: makes tokens random; remove it from the file")
    alone = [tokenizer.encode_batch([_SAMPLE])[0].ids for _ in range(2)]
    beside = [tokenizer.encode_batch(["", _SAMPLE, _SAMPLE * 2])[1].ids for _ in range(2)]
    if any(ids != alone[0] for ids in (*alone, *beside)):
        raise InputError("tokenizer.json: encodes a text differently alone and beside others; use another tokenizer")


def _loaded(model: Path) -> Any:
    if _is_complete(model):
        from transformers import TokenizersBackend

        return TokenizersBackend.from_pretrained(model, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)


def _is_complete(model: Path) -> bool:
    """Returns whether `AutoTokenizer` would choose the class that only reads `tokenizer.json`.

    It is left to say what is wrong with files that are missing or damaged.
    """
    try:
        names = "config.json", "tokenizer_config.json"
        config, tokenizer = (json.loads((model / name).read_bytes()) for name in names)
        plain = config["model_type"] in PLAIN and tokenizer["tokenizer_class"] == "TokenizersBackend"
        return plain and "auto_map" not in tokenizer and (model / "tokenizer.json").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False
