"""Prepares a model's tokenizer for the grammar engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from services.structure.errors import StructureError


@dataclass(frozen=True)
class Vocabulary:
    """Holds the tokens of a model as the grammar engine reads them.

    Attributes:
        ends: the bits of the tokens that end a completion.
        special: the texts of special tokens. The engine reads such a text in a grammar as the token.
        byte_tokens: the tokens of one byte, by the byte. A vocabulary may lack some.
    """

    tokenizer: LLTokenizer
    ends: int
    special: tuple[str, ...]
    byte_tokens: Mapping[int, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, ends: Iterable[int]) -> Self:
        """Reads a tokenizer of the `tokenizers` library. This takes about half a second.

        Raises:
            StructureError: the engine cannot read this tokenizer, or no token ends a completion.
        """
        last = sorted(ends)
        if not last:
            raise StructureError("this model has no token that ends an answer, which structured answers need")
        special = tuple(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
        try:
            engine = LLTokenizer(tokenizer.to_str(), eos_token=last)
        except ValueError:
            raise StructureError("the grammar engine cannot read this model's tokenizer") from None
        return cls(engine, sum(1 << end for end in last), special, _byte_tokens(engine))


def _byte_tokens(tokenizer: LLTokenizer) -> dict[int, int]:
    found: dict[int, int] = {}
    for token in range(tokenizer.vocab_size):
        text = b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
        if len(text) == 1:
            found.setdefault(text[0], token)
    return found
