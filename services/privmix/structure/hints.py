"""Guesses strings that lead out of free text, such as `Answer: A` for `(.|\\n)*Answer: [AB]`, so that an end is found.

No byte of free text is nearer to its end than another one, so that a search alone would try them all. The guesses are
what terminals say after a repetition without a bound: their literals, and examples of their regular expressions.
A guess that is wrong costs time alone.
"""

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MAX_HINTS = 48
MAX_LENGTH = 256
"""The maximum number of characters of a hint."""

_PART = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/', re.DOTALL)
_UNBOUNDED = re.compile(r"[*+]|,\}")
_CODE = re.compile(r"\\x\{([0-9A-Fa-f]{1,6})\}")
_LETTERS = {
    codes.CATEGORY_DIGIT: "0",
    codes.CATEGORY_NOT_DIGIT: "a",
    codes.CATEGORY_WORD: "a",
    codes.CATEGORY_NOT_WORD: "-",
    codes.CATEGORY_SPACE: " ",
    codes.CATEGORY_NOT_SPACE: "a",
}
_COMMON = "aA0 -._"


def hints_of(grammar: str) -> list[bytes]:
    """Returns at most `MAX_HINTS` guesses for a grammar (`privmix.structure.grammar`), the shortest first."""
    found: dict[str, None] = {}
    for part in json.loads(grammar)["grammars"]:
        for line in part.get("lark_grammar", "").split("\n"):
            if _UNBOUNDED.search(line):
                found |= dict.fromkeys(_of_line(line))
    kept = sorted((hint for hint in found if 0 < len(hint) <= MAX_LENGTH), key=len)
    return [hint.encode() for hint in kept[:MAX_HINTS]]


def _of_line(line: str) -> Iterator[str]:
    for part in _PART.findall(line):
        if part.startswith('"'):
            try:
                yield str(json.loads(part))
            except ValueError:
                continue
        else:
            yield from _of_regex(part[1:-1])


def _of_regex(pattern: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = parser.parse(_CODE.sub(lambda found: f"\\U{int(found[1], 16):08x}", pattern.replace(r"\/", "/")))
            yield from _tails(tuple(nodes))
    except (re.error, OverflowError, RecursionError, ValueError):
        return  # Rust's syntax has what Python's lacks


def _tails(nodes: Sequence[tuple[Any, Any]]) -> Iterator[str]:
    """Yields an example of what follows each repetition without a bound, here and within groups."""
    for at, (code, value) in enumerate(nodes):
        repeated = code in (codes.MAX_REPEAT, codes.MIN_REPEAT)
        if repeated and value[1] is codes.MAXREPEAT:
            yield _example(nodes[at + 1 :])
        for inner in _within(code, value):
            yield from _tails(tuple(inner))


def _within(code: Any, value: Any) -> Iterable[Any]:
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        return [value[2]]
    if code is codes.SUBPATTERN:
        return [value[3]]
    return value[1] if code is codes.BRANCH else []


def _example(nodes: Iterable[tuple[Any, Any]]) -> str:
    return "".join(_of_node(code, value) for code, value in nodes)[: MAX_LENGTH + 1]


def _of_node(code: Any, value: Any) -> str:
    if code is codes.LITERAL:
        return chr(value)
    if code in (codes.ANY, codes.NOT_LITERAL):
        return next(letter for letter in _COMMON if ord(letter) != value)
    if code is codes.IN:
        return _member(value)
    if code is codes.BRANCH:
        return min((_example(branch) for branch in value[1]), key=len)
    if code is codes.SUBPATTERN:
        return _example(value[3])
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        return _example(value[2]) * int(min(value[0], MAX_LENGTH))
    return ""


def _member(items: Sequence[tuple[Any, Any]]) -> str:
    (code, value), *_ = items
    if code is codes.NEGATE:
        return next((letter for letter in _COMMON if not any(_holds(item, letter) for item in items[1:])), "")
    if code is codes.CATEGORY:
        return _LETTERS.get(value, "a")
    return chr(value if code is codes.LITERAL else value[0])


def _holds(item: tuple[Any, Any], letter: str) -> bool:
    code, value = item
    if code is codes.LITERAL:
        return bool(value == ord(letter))
    if code is codes.RANGE:
        return bool(value[0] <= ord(letter) <= value[1])
    return _LETTERS.get(value) == letter
