"""Documents to blocks of tokens, share by share."""

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.training.corpus import Document
from services.training.errors import InputError
from services.training.partition import Partition, Share

Tokens = NDArray[np.int32]

# The label that PyTorch's cross entropy leaves out.
IGNORED = -100

_DOCUMENTS_AT_ONCE = 1024


def tokenize(documents: Iterable[Document], tokenizer: Any, partition: Partition) -> dict[Share, Tokens]:
    """The tokens of each share: its users' documents in their order, each ended by the end-of-sequence token.

    Returns:
        for each of `partition.shares`, in their order, int32 [tokens of the share]; empty for one without text.

    Raises:
        InputError: the tokenizer has no end-of-sequence token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError("the model's tokenizer has no end-of-sequence token (eos_token) to set documents apart")
    streams = {share: array("i") for share in partition.shares}
    for batch in _batches(documents):
        encoded = tokenizer([document.text for document in batch], verbose=False)["input_ids"]
        for document, tokens in zip(batch, encoded, strict=True):
            ended = tokens if tokens[-1:] == [end] else [*tokens, end]
            for share in partition.shares_of(document.user):
                streams[share].extend(ended)
    return {share: _numbers(stream) for share, stream in streams.items()}


def pack(tokens: Tokens, size: int) -> tuple[Tensor, Tensor]:
    """Cut a share's tokens into blocks.

    Returns:
        inputs and labels, int64 [blocks, size]; the last block is filled up with tokens whose label is `IGNORED`.
    """
    blocks = -(-len(tokens) // size)
    inputs = torch.zeros(blocks * size, dtype=torch.int64)
    labels = torch.full((blocks * size,), IGNORED)
    inputs[: len(tokens)] = labels[: len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
    return inputs.view(blocks, size), labels.view(blocks, size)


def _numbers(stream: "array[int]") -> Tokens:
    return np.frombuffer(stream, dtype=np.int32) if stream else np.empty(0, np.int32)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while batch := list(islice(iterator, _DOCUMENTS_AT_ONCE)):
        yield batch
