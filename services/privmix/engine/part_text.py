"""Stores the texts of parts that need no training: the public model reads a part's text before each sequence.

The directory of a text has the names of an adapter's files, so that manifests, hashes and volumes treat both alike. All
texts of an ensemble have the same number of tokens, so that the work for a row does not depend on the part.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor

from privmix.engine.adapter_config import CONFIG_FILE, WEIGHTS_FILE

_KIND = "PART_TEXT"


def text_files(tokens: NDArray[np.int32], size: int) -> dict[str, bytes]:
    """Returns the files of a part's text: its first `size` tokens.

    A shorter text is repeated. The last token is that of the whole text, which ends a document. Without any tokens, the
    text consists of zeros and depends on nothing.
    """
    text = torch.zeros(size, dtype=torch.int64)
    if len(tokens):
        text[:] = torch.from_numpy(tokens.astype(np.int64)).repeat(-(-size // len(tokens)))[:size]
        text[-1] = int(tokens[-1])
    config = json.dumps({"peft_type": _KIND, "tokens": size}, indent=2)
    return {CONFIG_FILE: config.encode(), WEIGHTS_FILE: save({"tokens": text})}


def read_text(path: Path) -> Tensor:
    """Returns the tokens of a part's text, int64 [tokens].

    Raises:
        ValueError: the directory holds an adapter.
    """
    if json.loads((path / CONFIG_FILE).read_text()).get("peft_type") != _KIND:
        raise ValueError(f"{path}: is an adapter and not the text of a part; its manifest must say how it attends")
    tokens: Tensor = load_file(path / WEIGHTS_FILE)["tokens"]
    return tokens


def read_texts(paths: Mapping[str, Path]) -> dict[str, Tensor]:
    """Returns the texts of an ensemble's parts by name.

    Raises:
        ValueError: two texts differ in their number of tokens, or `read_text` raises it.
    """
    texts = {name: read_text(path) for name, path in paths.items()}
    if len({len(text) for text in texts.values()}) > 1:
        raise ValueError("adapters: the texts of parts must have the same number of tokens; train the ensemble again")
    return texts
