"""Tokenizes documents and packs the tokens of each share into blocks."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privmix.foundation.errors import InputError
from privmix.tokenization.people_text import PeopleText
from privmix.training.corpus import Document, rendered
from privmix.training.partition import Partition, PartShare

Tokens = NDArray[np.int32]

# The label that PyTorch's cross entropy ignores.
IGNORED = -100

_DOCUMENTS_AT_ONCE = 1024


def tokenize(
    documents: Iterable[Document], tokenizer: Any, partition: Partition, block: int | None = None
) -> dict[PartShare, Tokens]:
    """Returns the tokens of each share: its users' documents in order, each followed by the end-of-sequence token.

    Args:
        block: so many tokens of all documents in order are one user's; None if documents name their users.

    Returns:
        int32 [tokens of the share] for each of `partition.shares`, in order; empty for a share without text.

    Raises:
        InputError: the tokenizer has no end-of-sequence token.
    """
    streams = {share: array("i") for share in partition.shares}
    for user, tokens in _encoded(documents, tokenizer, block):
        for share in partition.shares_of(user):
            streams[share].extend(tokens)
    return {share: _numbers(stream) for share, stream in streams.items()}


def contributions(documents: Iterable[Document], tokenizer: Any, limit: int, block: int | None = None) -> list[Tokens]:
    """Returns the tokens that each user contributes: the first `limit` tokens of its documents.

    Args:
        block: see `tokenize`.

    Returns:
        int32 [1 to limit tokens] for each user, in the order of their first documents.

    Raises:
        InputError: the tokenizer has no end-of-sequence token.
    """
    streams: dict[str, array[int]] = defaultdict(lambda: array("i"))
    for user, tokens in _encoded(documents, tokenizer, block):
        stream = streams[user]
        stream.extend(tokens[: limit - len(stream)])
    return [_numbers(stream) for stream in streams.values()]


def pack(tokens: Tokens, size: int) -> tuple[Tensor, Tensor]:
    """Cuts a share's tokens into blocks.

    Returns:
        inputs and labels, int64 [blocks, size]. Padding in the last block has the label `IGNORED`.
    """
    blocks = -(-len(tokens) // size)
    inputs = torch.zeros(blocks * size, dtype=torch.int64)
    labels = torch.full((blocks * size,), IGNORED)
    inputs[: len(tokens)] = labels[: len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
    return inputs.view(blocks, size), labels.view(blocks, size)


def even_size(tokens: int, largest: int) -> int:
    """Returns the smallest block size that needs no more blocks than `largest`; it minimizes padding."""
    blocks = -(-tokens // largest)
    return -(-tokens // blocks)


def similar(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yields indices of texts of similar length, the longest first, that have at most `tokens` tokens after padding.

    A text that is longer than that is alone.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[batch[0]] if batch else 0
        if batch and longest * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _encoded(documents: Iterable[Document], tokenizer: Any, block: int | None) -> Iterator[tuple[str, list[int]]]:
    """Yields users, each with tokens: those of a document, or a block of those of all."""
    if block is None:
        yield from _ended(documents, tokenizer)
        return
    pending, number = array("i"), 0
    for _, tokens in _ended(documents, tokenizer):
        pending.extend(tokens)
        while len(pending) >= block:
            yield f"block {number}", pending[:block].tolist()
            pending, number = pending[block:], number + 1
    if pending:
        yield f"block {number}", pending.tolist()


def _ended(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """Yields the user and the tokens of each document, followed by the end-of-sequence token.

    A special token that a person typed is text. Otherwise a typed end token would end the document.
    """
    people, end = PeopleText(tokenizer), tokenizer.eos_token_id
    if end is None:
        raise InputError("the model's tokenizer has no end-of-sequence token (eos_token) to separate documents")
    iterator = iter(documents)
    while batch := list(islice(iterator, _DOCUMENTS_AT_ONCE)):
        for document, tokens in zip(batch, _tokens(batch, people), strict=True):
            yield document.user, tokens if tokens[-1:] == [end] else [*tokens, end]


def _tokens(documents: Sequence[Document], people: PeopleText) -> Iterator[list[int]]:
    """Yields the tokens of each document. A conversation's are those of the chat template."""
    texts = iter(people.batch([each.text for each in documents if each.conversation is None], add_special_tokens=True))
    for document in documents:
        told = document.conversation
        yield next(texts) if told is None else people.rendered(*rendered(told, people))


def _numbers(stream: "array[int]") -> Tokens:
    return np.frombuffer(stream, dtype=np.int32) if stream else np.empty(0, np.int32)
