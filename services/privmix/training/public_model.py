"""Finds and checks the public model, and identifies it by hashes of its contents.

path = resolve()                     # the embedded default
path = resolve("org/model")          # a hub id
path = resolve("/models/llama")      # a Hugging Face model directory
revision(path), tokenizer_hash(path) # what a manifest records
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from zipfile import is_zipfile

from jinja2 import TemplateError, TemplateSyntaxError
from safetensors import SafetensorError, safe_open

from privmix.engine.adapter_config import CONFIG_FILE
from privmix.foundation.errors import InputError, PublicModelError
from privmix.foundation.files import digest_files
from privmix.foundation.urls import proxy_before
from privmix.tokenization.tokenizer import load_tokenizer
from privmix.training import embedded_model

DEFAULT = embedded_model.NAME

_WEIGHTS = ("*.safetensors", "*.bin")
_POINTER = b"version https://git-lfs"
_DESCRIPTIONS = ("*.json", "*.txt", "*.model", "*.jinja")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# These fields vary with the software that saved the model and do not affect its distributions.
_CONFIG_NOISE = ("_name_or_path", "transformers_version")


def resolve(model: str | None = None) -> Path:
    """Returns the directory of a causal language model that transformers and vLLM can load.

    Args:
        model: a Hugging Face model directory, a hub id, or None for the embedded `smollm2-135m`.

    Raises:
        PublicModelError: the model is missing, cannot be downloaded or is not a causal language model; or its tokenizer
            is missing, does not fit its embeddings, or encodes a text differently beside others.
    """
    path = _locate(model or DEFAULT)
    _check_weights(path, read_config(path))
    _check_loadable(path)
    return path


def revision(path: Path) -> str:
    """Returns the SHA-256 (hexadecimal) of all that determines the distributions: weights and configuration."""
    config = read_config(path)
    for key in _CONFIG_NOISE:
        config.pop(key, None)
    content = json.dumps(config, sort_keys=True) + digest_files(path, _weight_files(path))
    return hashlib.sha256(content.encode()).hexdigest()


def tokenizer_hash(path: Path) -> str:
    """Returns the SHA-256 (hexadecimal) of the tokenizer's files."""
    return digest_files(path, [name for name in _TOKENIZER_FILES if (path / name).is_file()])


def _locate(model: str) -> Path:
    if model == DEFAULT:
        return embedded_model.converted()
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise PublicModelError(f"model {model}: is a file; name the directory that holds config.json and the weights")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise PublicModelError(f"model {model}: there is no such directory")
    return _download(model)


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import ENDPOINT

    try:
        # Many repositories have their weights in several formats; one format is enough.
        for weights in _WEIGHTS:
            path = Path(snapshot_download(model, allow_patterns=[weights, *_DESCRIPTIONS]))
            if any(path.glob(weights)):
                return path
    # The hub client raises errors of several HTTP libraries. All of them mean that the download failed.
    except Exception as error:
        proxy = proxy_before(ENDPOINT)
        network = f"the proxy of {proxy}" if proxy else "the network"
        raise PublicModelError(
            f"model {model}: not a directory here, and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}). Check the name and {network}, or give the directory of a downloaded model"
        ) from error
    raise PublicModelError(f"model {model}: the repository has no weights (*.safetensors or *.bin)")


@lru_cache(maxsize=16)
def _check_loadable(path: Path) -> None:
    if embedded_model.is_converted(path):  # by transformers, whose import takes seconds
        return
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if "auto_map" in read_config(path):
            raise PublicModelError(
                f"model {path}: brings its own code (config.json, auto_map), which privmix never runs; use a model "
                "that transformers knows"
            ) from error
        raise PublicModelError(f"model {path}: transformers does not know this config.json: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise PublicModelError(f"model {path}: {config.model_type} is not a causal language model")
    try:
        tokenizer = load_tokenizer(path)
    except InputError as error:
        raise PublicModelError(f"model {path}: {error}") from None
    # Each tokenizer format raises its own error types for broken files.
    except Exception as error:
        raise PublicModelError(
            f"model {path}: its tokenizer is missing or damaged ({type(error).__name__}); "
            "put the tokenizer files of this model into the directory"
        ) from error
    try:
        if tokenizer.chat_template:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise PublicModelError(
            f"model {path}: its chat template is damaged (line {error.lineno}: {error.message}); copy "
            "chat_template.jinja or tokenizer_config.json again"
        ) from error
    except (TemplateError, TypeError, ValueError):
        pass  # a template may refuse a conversation
    embeddings = config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0:
        raise PublicModelError(f"model {path}: its tokenizer has no tokens; put the model's own tokenizer there")
    if largest >= embeddings:
        raise PublicModelError(
            f"model {path}: its tokenizer has token ids up to {largest}, its embeddings only {embeddings} rows; "
            "the tokenizer belongs to another model"
        )


def read_config(path: Path) -> dict[str, object]:
    """Returns a model's `config.json`. Raises PublicModelError if it is missing or no JSON object."""
    try:
        config = json.loads((path / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise PublicModelError(f"model {path}: has no config.json; it is not a Hugging Face model directory") from error
    except ValueError as error:
        raise PublicModelError(f"model {path}: its config.json is not JSON") from error
    if not isinstance(config, dict):
        raise PublicModelError(f"model {path}: its config.json is not a JSON object")
    return config


def _weight_files(path: Path) -> list[str]:
    """Returns the names of the weights that transformers loads.

    Raises:
        PublicModelError: there are none, or the index is damaged.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return [name]
        index = path / f"{name}.index.json"
        if index.is_file():
            try:
                names = sorted({*json.loads(index.read_bytes())["weight_map"].values()})
            except (ValueError, KeyError, TypeError, AttributeError):
                names = []
            if names:
                return names
            raise PublicModelError(f"model {index}: is not an index of weights; copy it again")
    raise PublicModelError(f"model {path}: has no weights (model.safetensors or pytorch_model.bin, or their index)")


def _check_weights(path: Path, config: Mapping[str, object]) -> None:
    """Raises PublicModelError if weights are missing, cut, quantised, or an adapter's. It reads their headers alone."""
    for name in _weight_files(path):
        if problem := _damage(path / name):
            raise PublicModelError(f"model {path / name}: {problem}")
    if (path / CONFIG_FILE).exists():  # transformers would load its base in the place of these weights
        raise PublicModelError(f"model {path}: holds an adapter beside the weights; move {CONFIG_FILE} elsewhere")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise PublicModelError(
            f"model {path}: its weights are quantised (config.json, quantization_config: {method}), and adapters need "
            "full ones; use the model that it was made of"
        )


def _damage(file: Path) -> str | None:
    """Returns what is wrong with a file of weights and the fix; None if nothing is."""
    try:
        with file.open("rb") as content:
            head = content.read(len(_POINTER))
        if head == _POINTER:
            return "is a pointer of Git LFS and not the weights; run `git lfs pull` in its directory"
        if file.suffix == ".safetensors":
            with safe_open(file, "np") as weights:
                packed = any(name.endswith(".qweight") for name in weights.keys())  # noqa: SIM118, it is no mapping
                return "holds quantised weights; use the model that it was made of" if packed else None
        return "is damaged or cut; download it again" if head[:2] == b"PK" and not is_zipfile(file) else None
    except OSError as error:
        return f"cannot be read ({error.strerror or type(error).__name__}); download it again"
    except SafetensorError:
        return "is damaged or cut; download it again"
