"""Prepares a model's tokenizer for the grammar engine."""

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from privmix.structure.errors import StructureError


@dataclass(frozen=True)
class Vocabulary:
    """Holds the tokens of a model as the grammar engine reads them.

    Attributes:
        ends: the bits of the tokens that end a completion.
        byte_tokens: the tokens of one byte, by the byte. A vocabulary may lack some.
    """

    tokenizer: LLTokenizer
    ends: int
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
        try:
            engine = LLTokenizer(_without_special_texts(tokenizer.to_str()), eos_token=last)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise StructureError("the grammar engine cannot read this model's tokenizer") from None
        return cls(engine, sum(1 << end for end in last), _byte_tokens(engine))


BYTES = Vocabulary(LLTokenizer("byte"), 0, {byte: byte for byte in range(256)})
"""The vocabulary of single bytes, whose masks take little time."""


def _byte_tokens(tokenizer: LLTokenizer) -> dict[int, int]:
    found: dict[int, int] = {}
    for token in range(tokenizer.vocab_size):
        text = b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
        if len(text) == 1:
            found.setdefault(text[0], token)
    return found


def _without_special_texts(text: str) -> str:
    """Returns a `tokenizer.json` whose special tokens have names that no text contains.

    llguidance 1.7.6 tokenises what a grammar forces. It would read the text of a special token as that token, which no
    grammar admits, and the answer could not go on. With these names it is text like any other.
    """
    tokenizer = json.loads(text)
    salt = secrets.token_hex(16)
    names: dict[str, str] = {}
    for token in tokenizer["added_tokens"]:
        content = token["content"]
        if token["special"] or (content.startswith("<") and content.endswith(">")):  # as the engine decides it
            names[content] = token["content"] = f"<{salt} {token['id']}>"
    _rename(tokenizer["model"], names)
    return json.dumps(tokenizer)


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Renames tokens of a tokenizer's model. Merges that make one of them, or use one, are left out."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [list(pair) for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
