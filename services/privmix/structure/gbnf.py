"""Translates the escapes of GBNF, of which llguidance's converter knows few, before it converts a grammar to Lark.

Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from privmix.structure.errors import StructureError

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_KEPT = "nrt\\"


def to_lark(text: str) -> str:
    """Returns a grammar in the Lark format, which is in this format or in GBNF.

    Raises:
        StructureError: the GBNF is invalid.
    """
    try:
        return text if is_lark_syntax(text) else gbnf_to_lark(_TOKEN.sub(_translated, text))
    except Exception:  # the converter raises whatever its parser meets
        raise StructureError("the GBNF of this grammar cannot be read") from None


def _translated(token: re.Match[str]) -> str:
    text = token[0]
    if text.startswith("["):
        return _ESCAPE.sub(_in_class, text)
    if not text.startswith('"'):
        return text
    literal = _ESCAPE.sub(_in_literal, text)
    return literal if " [" not in literal or literal == text else f"({literal})"


def _in_class(escape: re.Match[str]) -> str:
    if escape[4] and escape[4] in _KEPT + "[]":
        return escape[0]
    return _escaped(_letter(escape))


def _in_literal(escape: re.Match[str]) -> str:
    if escape[4] and escape[4] in _KEPT + '"':
        return escape[0]
    letter = _letter(escape)
    if letter in '"\\':
        return f"\\{letter}"
    return letter if letter.isprintable() else f'" [{_escaped(letter)}] "'


def _escaped(letter: str) -> str:
    return f"\\x{ord(letter):02X}" if letter.isascii() else letter


def _letter(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    return chr(int(code, 16)) if code else escape[4]
