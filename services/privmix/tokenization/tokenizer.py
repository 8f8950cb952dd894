"""Loads the tokenizer of a Hugging Face model directory."""

import json
from pathlib import Path
from typing import Any

PLAIN = frozenset({"llama"})
"""The model types for which transformers has no class of tokenizers, so that the files alone describe it."""


def load_tokenizer(model: Path) -> Any:
    """Returns what `AutoTokenizer` loads from a model directory.

    The import of `AutoTokenizer` brings the code that generates text and takes seconds of a processor, in each process
    of a service that reads a tokenizer. A tokenizer that the files describe completely needs a quarter of that.

    Raises:
        OSError, ValueError: the directory has no usable tokenizer.
    """
    if _is_complete(model):
        from transformers import TokenizersBackend

        return TokenizersBackend.from_pretrained(model, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)


def _is_complete(model: Path) -> bool:
    """Returns whether `AutoTokenizer` would choose the class that only reads `tokenizer.json`."""
    config, tokenizer = (_read(model / name) for name in ("config.json", "tokenizer_config.json"))
    return (
        (model / "tokenizer.json").is_file()
        and config.get("model_type") in PLAIN
        and tokenizer.get("tokenizer_class") == "TokenizersBackend"
        and "auto_map" not in tokenizer
    )


def _read(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file, or an empty one: `AutoTokenizer` says what is wrong with the file."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
