"""Grammars, and matchers of the public model's vocabulary, for tests of structured answers."""

from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from privmix.structure import grammar
from privmix.structure.compiler import begun
from privmix.structure.matcher import Matcher
from privmix.structure.vocabulary import Vocabulary
from privmix.training.public_model import resolve

TICKET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "reason": {"enum": ["a sore throat", "a flu shot", "a prescription"]},
        "urgent": {"type": "boolean"},
        "visits": {"type": "array", "items": {"$ref": "#/$defs/visit"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "reason", "urgent", "visits"],
    "additionalProperties": False,
    "$defs": {
        "visit": {
            "type": "object",
            "properties": {"year": {"type": "integer", "minimum": 1990, "maximum": 2030}},
            "required": ["year"],
            "additionalProperties": False,
        }
    },
}
GRAMMARS = {
    "schema": grammar.of_json_schema(TICKET),
    "constant": grammar.of_json_schema({"const": {"a": [1, None, "é"]}}),
    "choice": grammar.of_choice(["yes", "yesterday", "no"]),
    "regex": grammar.of_regex("[A-Z][a-z]{2,5} [0-9]{3}-[0-9]{4}"),
}


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.of(AutoTokenizer.from_pretrained(resolve()).backend_tokenizer, {0, 2})


def matcher(text: str) -> Matcher:
    return begun(text, vocabulary())[0]


def tokens_of(legal: bytes) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(np.frombuffer(legal, np.uint8), bitorder="little"))]


def bytewise() -> Tokenizer:
    """Returns a tokenizer of single bytes, which is read at once."""
    vocabulary = {byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@cache
def words() -> Vocabulary:
    """Returns the vocabulary of single bytes, of which special tokens are the last."""
    tokenizer = bytewise()
    return Vocabulary.of(tokenizer, {tokenizer.get_vocab_size() - 1})
