"""Draws texts of a grammar and judges them by the `jsonschema` package, which shares no code with the engine."""

import json
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema

from privmix.structure.errors import StructureError
from privmix.structure.matcher import Matcher
from tests.support.structure import tokens_of, vocabulary

SCHEMAS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))
"""Small schemas with instances, in the form of JSON Schema's own test suite."""


def draw(follower: Matcher, chance: random.Random, longest: int = 200) -> str | None:
    """Returns a text of legal tokens, which is ended as a coordinator ends it after `longest` tokens or earlier.

    None if it can neither go on nor be ended.
    """
    words = vocabulary()
    text: tuple[int, ...] = ()
    known: tuple[int, ...] | None = None  # the text before the last token, with its end
    length = chance.choice((0, 5, 20, longest))
    while True:
        try:
            position = follower.after(text)
        except StructureError:  # a token after which the engine gives up: a coordinator releases the known end instead
            return None if known is None else words.tokenizer.decode_str(list(known))
        text += position.forced
        if position.complete:
            break
        if position.end is None:
            return None if known is None else words.tokenizer.decode_str(list(known))
        known = text + position.end
        if len(text) >= length:
            text += position.end
            break
        legal = tokens_of(position.legal)
        some = chance.sample(legal, min(len(legal), 40))
        ending = [token for token in some if re.fullmatch(r'[a-z0-9]?["}\]),]*', words.tokenizer.decode_str([token]))]
        token = chance.choice(ending if ending and chance.random() < 0.7 else some)
        if words.ends >> token & 1:
            break
        text += (token,)
    return words.tokenizer.decode_str(list(text))


class Written(float):
    """A number with its digits, some of which a float loses above 2^53."""

    def __init__(self, digits: str) -> None:
        self.digits = digits


def is_valid(schema: Any, text: str) -> bool:
    """Tells whether a text is a value of a schema, but for what the library lets through."""
    try:
        value = json.loads(text, parse_float=Written, object_pairs_hook=_object)
    except ValueError:
        return False
    base = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    # Exclusive bounds are read as others, dates as any text, and infinite numbers pass.
    own = {
        "multipleOf": _multiple_of,
        "exclusiveMinimum": _bound(base, "minimum"),
        "exclusiveMaximum": _bound(base, "maximum"),
    }
    formats = jsonschema.FormatChecker(["ipv4", "ipv6", "uuid", "email"])
    return bool(jsonschema.validators.extend(base, own)(schema, format_checker=formats).is_valid(value))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object that counts a repeated name as often as the library does."""
    names = [name for name, _ in pairs]
    return {name if name not in names[:at] else f"{name} {at}": value for at, (name, value) in enumerate(pairs)}


def _bound(base: Any, name: str) -> Any:
    def check(validator: Any, bound: Any, value: Any, schema: Any) -> Any:
        return () if isinstance(bound, bool) else base.VALIDATORS[name](validator, bound, value, schema)

    return check


def _multiple_of(_: Any, step: Any, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Replaces the package's check, which divides floats: 0.07 is a multiple of 0.01."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    digits = getattr(value, "digits", str(value))
    if number and (Fraction(Decimal(digits)) / Fraction(Decimal(str(step)))).denominator != 1:
        yield jsonschema.ValidationError("is not a multiple")
