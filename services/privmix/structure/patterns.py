"""Writes the terminals of JSON strings that match regular expressions of JSON Schema.

JSON Schema searches an expression in a string; a terminal matches a whole string. A terminal's text is the string as
`json.dumps(string, ensure_ascii=False)` writes it, so that each string has one text.

The dialect is that of ECMA-262. Where it and Python's or Rust's disagree on a class (`\\d`, `\\w`, `\\s`, `.` and their
complements), a character matches if all of them say so. Python's parser reads the expressions.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from privmix.structure.errors import StructureError

MAX_EXPRESSION = 32 * 1024
"""The maximum number of characters of a translated expression."""
COUNTED = 16
"""From this bound of a repetition on, a match begins at the first place where one may begin."""

_ESCAPED = [chr(code) for code in range(0x20)] + ['"', "\\"]
_NO_ESCAPED = r'["\\\x00-\x1F]'
_SPACE = r"\t\n\x0B\f\r \xA0\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
# The class in a set, and in the complement of a set: each as narrow as it makes the whole set.
_CLASSES = {
    codes.CATEGORY_DIGIT: ("0-9", r"\d"),
    codes.CATEGORY_NOT_DIGIT: (r"\D", r"[^0-9]"),
    codes.CATEGORY_WORD: ("0-9A-Za-z_", r"\w"),
    codes.CATEGORY_NOT_WORD: (r"\W", "[^0-9A-Za-z_]"),
    codes.CATEGORY_SPACE: (_SPACE, r"\s\x{FEFF}"),
    codes.CATEGORY_NOT_SPACE: (r"[\S--\x{FEFF}]", rf"[^{_SPACE}]"),
}
_MEMBERS: dict[Any, Callable[[str], bool]] = {
    codes.CATEGORY_DIGIT: str.isdigit,
    codes.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdigit(),
    codes.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
    codes.CATEGORY_NOT_WORD: lambda letter: not (letter.isalnum() or letter == "_"),
    codes.CATEGORY_SPACE: lambda letter: letter in "\t\n\x0b\x0c\r ",
    codes.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
}
_SPECIAL = (codes.AT, codes.ASSERT, codes.ASSERT_NOT)
_PROPERTY = re.compile(r"\\([pP])\{([A-Za-z0-9_=]{1,40})\}")
_FIRST_PRIVATE = 0xF0000

_Parsed = tuple[Any, Any]


def anything(least: int = 0, most: int | None = None) -> str:
    """Returns the expression of strings by their number of characters, without quotation marks."""
    count = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
    return f"/(?:{_ANY}){count}/"


def search(pattern: str) -> str | None:
    """Returns the expression, in the Lark format, of the strings in which a pattern is found, without quotation marks.

    Returns None if it is found in no string.

    Raises:
        StructureError: the pattern is invalid, or uses what is not supported: look-behind, references to groups, word
            boundaries, or an anchor in a repetition.
    """
    return _Translation(pattern).search()


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._properties: dict[str, str] = {}
        source = _PROPERTY.sub(self._placeholder, pattern.replace("(?<", "(?P<"))
        source = source.replace("(?P<=", "(?<=").replace("(?P<!", "(?<!")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._nodes = parser.parse(source)
        except (re.error, OverflowError, RecursionError, ValueError):
            raise StructureError("pattern: the regular expression is invalid") from None
        self._flags = self._nodes.state.flags

    def _placeholder(self, found: re.Match[str]) -> str:
        letter = chr(_FIRST_PRIVATE + len(self._properties))
        self._properties[letter] = rf"\{found[1]}{{{found[2]}}}"
        return letter

    def search(self) -> str | None:
        nodes = tuple(self._nodes)
        first, later = self._tail(nodes, self._flags, True), self._tail(nodes, self._flags, False)
        if first is not None and first == later:
            found: str | None = f"{self._before(nodes) or anything()} {first}"
        else:
            found = _either([first, None if later is None else f"{anything(1)} {later}"])
        if found is not None and len(found) > MAX_EXPRESSION:
            raise StructureError("pattern: the regular expression is too large")
        return found

    def _before(self, nodes: Sequence[_Parsed]) -> str | None:
        """Returns the expression of text in which no match begins, for a pattern that counts; None for others.

        The engine would follow a match from each place where one may begin, and these have more states together than it
        may have. So the first place must do.
        """
        if not nodes or nodes[0][0] not in (codes.LITERAL, codes.IN) or _count(nodes) < COUNTED:
            return None
        code, value = nodes[0]
        items = [(code, value)] if code is codes.LITERAL else value
        negated = items[0][0] is codes.NEGATE
        return f"/{self._set(items[1:] if negated else [(codes.NEGATE, None), *items], self._flags)}*/"

    def _tail(self, nodes: Sequence[_Parsed], flags: int, at_start: bool) -> str | None:
        """Returns the expression of the ends of strings that begin with a match of the nodes; None if there is none."""
        plain: list[str] = []
        for index, (code, value) in enumerate(nodes):
            if not _special((code, value)):
                plain.append(self._regex((code, value), flags))
                at_start = False
                continue
            rest = nodes[index + 1 :]
            end = self._special_tail(code, value, rest, flags, at_start)
            return None if end is None else " ".join([*_joined(plain), end])
        return " ".join([*_joined(plain), anything()])

    def _special_tail(self, code: Any, value: Any, rest: Sequence[_Parsed], flags: int, at_start: bool) -> str | None:
        if code is codes.AT and value in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
            return self._tail(rest, flags, True) if at_start else None
        if code is codes.AT and value in (codes.AT_END, codes.AT_END_STRING):
            return '""' if all(_nullable(node) for node in rest) else None
        if code in (codes.ASSERT, codes.ASSERT_NOT) and value[0] > 0:
            follows, ahead = self._tail(rest, flags, at_start), self._tail(tuple(value[1]), flags, at_start)
            if code is codes.ASSERT_NOT:
                ahead = anything() if ahead is None else f"({anything()} & ~({ahead}))"
            return None if follows is None or ahead is None else f"(({ahead}) & ({follows}))"
        if code is codes.BRANCH:
            return _either(self._tail((*branch, *rest), flags, at_start) for branch in value[1])
        if code is codes.SUBPATTERN and not value[1] and not value[2]:
            return self._tail((*value[3], *rest), flags, at_start)
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT) and value[:2] in ((0, 1), (1, 1)):
            taken = [self._tail((*value[2], *rest), flags, at_start)]
            return _either(taken + ([self._tail(rest, flags, at_start)] if value[0] == 0 else []))
        raise StructureError(
            "pattern: the regular expression is not supported (look-behind, word boundaries, and anchors or look-ahead "
            "in a repetition are not)"
        )

    def _regex(self, node: _Parsed, flags: int) -> str:
        """Returns a regular expression of Rust, in a group, for a node without anchors and look-ahead."""
        code, value = node
        if code is codes.LITERAL:
            return self._set([(codes.LITERAL, value)], flags)
        if code is codes.NOT_LITERAL:
            return self._set([(codes.NEGATE, None), (codes.LITERAL, value)], flags)
        if code is codes.ANY:
            ends = () if flags & re.DOTALL else (0x0A, 0x0D, 0x2028, 0x2029)
            return self._set([(codes.NEGATE, None), *((codes.LITERAL, end) for end in ends)], flags)
        if code is codes.IN:
            return self._set(value, flags)
        if code is codes.BRANCH:
            return "(?:" + "|".join(self._sequence(branch, flags) for branch in value[1]) + ")"
        if code is codes.SUBPATTERN:
            return "(?:" + self._sequence(value[3], (flags | value[1]) & ~value[2]) + ")"
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, repeated = value
            bound = "" if most is codes.MAXREPEAT else most
            return f"(?:{self._sequence(repeated, flags)}){{{least},{bound}}}"
        raise StructureError(
            "pattern: the regular expression is not supported (references to groups, and what ECMA-262 lacks, are not)"
        )

    def _sequence(self, nodes: Iterable[_Parsed], flags: int) -> str:
        return "".join(self._regex(node, flags) for node in nodes)

    def _set(self, items: Sequence[_Parsed], flags: int) -> str:
        """Returns the expression of a set of characters as JSON writes them."""
        complement = bool(items) and items[0][0] is codes.NEGATE
        items = items[1:] if complement else items
        members = "".join(self._item(item, complement) for item in items)
        plain = not complement and not any(_has(item, letter) for item in items for letter in _ESCAPED)
        if plain and not flags & re.IGNORECASE:
            return (
                _letter(items[0][1])
                if _is_letter(items) and chr(items[0][1]) not in self._properties
                else f"[{members}]"
            )
        raw = f"[^{members}{_NO_ESCAPED}]" if complement else f"[[{members}]--{_NO_ESCAPED}]"
        if flags & re.IGNORECASE:
            raw = f"(?i:{raw})"
        escaped = [letter for letter in _ESCAPED if any(_has(item, letter) for item in items) != complement]
        return "(?:" + "|".join([raw, *(_literal(json.dumps(letter)[1:-1]) for letter in escaped)]) + ")"

    def _item(self, item: _Parsed, complement: bool) -> str:
        code, value = item
        ends = (value,) if code is codes.LITERAL else value if code is codes.RANGE else ()
        if any(0xD800 <= end <= 0xDFFF for end in ends):
            raise StructureError("pattern: half of a surrogate pair is no character")
        if code is codes.LITERAL:
            return self._properties.get(chr(value), _letter(value))
        if code is codes.RANGE:
            return f"{_letter(value[0])}-{_letter(value[1])}"
        return _CLASSES[value][complement]


_ANY = r'[^"\\\x00-\x1F]|\\["\\bfnrt]|\\u00(?:0[0-7bef]|1[0-9a-f])'


def quoted(content: str) -> str:
    """Returns the expression of strings with quotation marks."""
    return rf'"\"" ({content}) "\""'


def _literal(text: str) -> str:
    return "".join(_letter(ord(letter)) for letter in text)


def _is_letter(items: Sequence[_Parsed]) -> bool:
    return len(items) == 1 and items[0][0] is codes.LITERAL


def _letter(code: int) -> str:
    letter = chr(code)
    return letter if letter.isascii() and letter.isalnum() else rf"\x{{{code:X}}}"


def _has(item: _Parsed, letter: str) -> bool:
    code, value = item
    if code is codes.LITERAL:
        return bool(ord(letter) == value)
    if code is codes.RANGE:
        return bool(value[0] <= ord(letter) <= value[1])
    return _MEMBERS[value](letter)


def _joined(plain: list[str]) -> list[str]:
    return [f"/{''.join(plain)}/"] if plain else []


def _either(options: Iterable[str | None]) -> str | None:
    found = list(dict.fromkeys(option for option in options if option is not None))
    return f"({' | '.join(found)})" if found else None


def _count(nodes: Iterable[_Parsed]) -> int:
    """Returns the greatest bound of a repetition whose number is no fixed one."""
    counts = [0]
    for code, value in nodes:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, repeated = value
            counts += [least if most is codes.MAXREPEAT else most if most != least else 0, _count(repeated)]
        elif code is codes.SUBPATTERN:
            counts.append(_count(value[3]))
        elif code is codes.BRANCH:
            counts += [_count(branch) for branch in value[1]]
    return max(counts)


def _special(node: _Parsed) -> bool:
    """Tells whether a node has an anchor or looks around."""
    code, value = node
    if code in _SPECIAL:
        return True
    if code is codes.BRANCH:
        return any(_special(inner) for branch in value[1] for inner in branch)
    if code is codes.SUBPATTERN:
        return any(_special(inner) for inner in value[3])
    return code in (codes.MAX_REPEAT, codes.MIN_REPEAT) and any(_special(inner) for inner in value[2])


def _nullable(node: _Parsed) -> bool:
    code, value = node
    if code is codes.AT:
        return value in (codes.AT_END, codes.AT_END_STRING)
    if code is codes.BRANCH:
        return any(all(map(_nullable, branch)) for branch in value[1])
    if code is codes.SUBPATTERN:
        return all(map(_nullable, value[3]))
    return code in (codes.MAX_REPEAT, codes.MIN_REPEAT) and (value[0] == 0 or all(map(_nullable, value[2])))
