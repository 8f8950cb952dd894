"""Held-out text as blocks of tokens, and the positions of it that each run evaluates."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.errors import InputError
from services.training.corpus import Document

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens of one user's text, of which each is predicted from those before it in the block.

    Attributes:
        tokens: the context and, from the second on, the targets.
        targets: the indices of the tokens that are evaluated, ascending, all above 0.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """The blocks that are evaluated. Their targets, one block after another, are the positions 0 … positions - 1.

    Attributes:
        runs: for each run the positions that it evaluates, in the order in which a service would release them.
    """

    blocks: tuple[Block, ...]
    runs: tuple[Positions, ...]

    @property
    def positions(self) -> int:
        return sum(len(block.targets) for block in self.blocks)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first position of each block."""
        return tuple(accumulate((len(block.targets) for block in self.blocks), initial=0))[:-1]

    @cached_property
    def true_tokens(self) -> NDArray[np.int64]:
        """int64 [positions]: what really stood there."""
        return np.array([block.tokens[index] for block in self.blocks for index in block.targets], dtype=np.int64)

    @cached_property
    def digest(self) -> str:
        """Names the text: rows that were computed for another one have another name."""
        listing = repr([(block.tokens, block.targets) for block in self.blocks])
        return hashlib.sha256(listing.encode()).hexdigest()

    @property
    def apart(self) -> bool:
        """Whether no two runs share a position."""
        return sum(map(len, self.runs)) <= self.positions


def held_out_text(
    documents: Iterable[Document], tokenizer: Any, *, context: int, tokens: int, runs: int, seed: int = 0
) -> Text:
    """The part of a held-out corpus that `runs` runs of `tokens` tokens each need, drawn block by block.

    A run evaluates fewer where the corpus has fewer; runs share positions where it does not suffice for all.

    Args:
        context: tokens a block, at most.
        seed: decides which blocks; it is no secret.

    Raises:
        InputError: the corpus has no text to evaluate.
    """
    blocks = [block for user in _streams(documents, tokenizer) for block in _cut(user, context)]
    if not blocks:
        raise InputError("held-out text: has no document of at least two tokens")
    chosen, found = [], 0
    for index in np.random.default_rng(seed).permutation(len(blocks)):
        if found >= tokens * runs:
            break
        chosen.append(blocks[index])
        found += len(chosen[-1].targets)
    length = min(tokens, found)
    starts = [(run * length) % found for run in range(runs)]
    return Text(tuple(chosen), tuple((start + np.arange(length)) % found for start in starts))


# A token, and whether it is evaluated.
_Stream = list[tuple[int, bool]]


def _streams(documents: Iterable[Document], tokenizer: Any) -> Iterable[_Stream]:
    """Each user's documents in their order, each ended as in training: by a token that is context, never evaluated.

    Another separator (a blank line, say) is one that the models were not trained with: on the speeches, an adapter's
    gain over the public model falls from 0.34 to 0.15 nats a token.
    """
    users: dict[str, _Stream] = defaultdict(list)
    for document in documents:
        text = tokenizer(document.text, verbose=False, add_special_tokens=False)["input_ids"]
        users[document.user] += [(token, True) for token in text] + [(tokenizer.eos_token_id, False)]
    return users.values()


def _cut(stream: _Stream, context: int) -> Iterable[Block]:
    for start in range(0, len(stream), context):
        block = _block(stream[start : start + context])
        if block.targets:
            yield block


def _block(stream: Sequence[tuple[int, bool]]) -> Block:
    tokens = tuple(token for token, _ in stream)
    return Block(tokens, tuple(index for index, (_, evaluated) in enumerate(stream) if evaluated and index))
