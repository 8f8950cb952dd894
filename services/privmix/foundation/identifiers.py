"""Reads the identifier of a user by one rule, whatever the format: one meaning is one text.

    identifier(7), identifier(7.0), identifier("7.0"), identifier(Decimal("7.00"))    # "7" each

The rule reads one value alone. A rule that guessed a type from a whole column would let one user's identifier change
those of all others.
"""

import re
import unicodedata
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np

from privmix.foundation.json_lines import BadRow

LONGEST = 2048
"""The most characters of an identifier."""

_MISSING = frozenset({"nan", "NaN", "NaT", "None", "NULL", "null", "NA", "<NA>", "N/A", "#N/A"})
"""What tools write in the place of a missing identifier."""
_GIVE = "give it the id of the user whose row it is"
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.0+)?")
_ROUNDED = re.compile(r"-?[0-9]+(\.[0-9]+)?[eE]\+[0-9]+")
"""What tools write for large numbers that they hold as floats."""


def identifier(value: Any, field: str | None = None) -> str:
    """Returns the text that identifies a user.

    Text stays as it is, without white space around it, in Unicode's form NFC. A whole number has its decimal digits,
    also if it is a float, or text with zeros after the point. `0001` is text. Dates have ISO's form, UUIDs their own.

    Args:
        value: a value of one row, in the type that its format gives it. NumPy's narrow floats keep their type.
        field: the name of the field, for the error.

    Raises:
        BadRow: the value is missing, is of another type, or is a float that cannot be told from its neighbours.
    """
    text = _text(value, field)
    if text == "" or text in _MISSING:
        raise BadRow("names no user", _GIVE, field)
    return encodable(text, field)


def encodable(text: str, field: str | None = None) -> str:
    """Returns a text.

    Raises:
        BadRow: the text has characters that UTF-8 does not have.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Readers decode bytes that are not UTF-8 to these.
        if 0xDC80 <= ord(text[error.start]) <= 0xDCFF:
            raise BadRow("is not UTF-8", "convert the file to UTF-8", field) from None
        raise BadRow("has half of a surrogate pair", "write the character whole", field) from None
    return text


def _text(value: Any, field: str | None) -> str:
    match value:
        case None:
            return ""
        case str():
            return _of_text(value, field)
        case bytes():  # some writers of Parquet do not say that their bytes are text
            return _of_text(_decoded(value, field), field)
        case UUID():
            return str(value)
        case date() if not isinstance(value, datetime):
            return value.isoformat()
        case float() | np.floating() | Decimal():
            return _of_number(value, field)
        case int() | np.integer() if not isinstance(value, bool):
            return str(int(value))
    raise BadRow("is neither text nor a whole number", "write the user's id as text", field)


def _of_text(text: str, field: str | None) -> str:
    stripped = unicodedata.normalize("NFC", text.strip())
    if text and not stripped:
        raise BadRow("is blank", _GIVE, field)
    if len(stripped) > LONGEST:
        raise BadRow("is too long", f"give an id of at most {LONGEST} characters", field)
    if _ROUNDED.fullmatch(stripped):
        raise _rounded(field)
    if whole := _WHOLE.fullmatch(stripped):
        if whole[2] and abs(int(whole[1])) >= _exact_below(np.float64):
            raise _rounded(field)
        return "0" if whole[1] == "-0" else whole[1]
    return stripped


def _of_number(value: Any, field: str | None) -> str:
    if value != value:
        return ""
    if not np.isfinite(float(value)) or value != int(value):
        raise BadRow("is neither text nor a whole number", "write the user's id as text", field)
    kind = type(value) if isinstance(value, np.floating) else np.float64
    if not isinstance(value, Decimal) and abs(value) >= _exact_below(kind):
        raise _rounded(field)
    return str(int(value))


def _exact_below(kind: type[Any]) -> int:
    """Returns the number from which on floats of this type skip whole numbers."""
    return 1 << (int(np.finfo(kind).nmant) + 1)


def _rounded(field: str | None) -> BadRow:
    return BadRow(
        "is a number that was rounded, so that several users may share it", "write ids as text or whole numbers", field
    )


def _decoded(value: bytes, field: str | None) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadRow("is binary", "write the user's id as text", field) from None
