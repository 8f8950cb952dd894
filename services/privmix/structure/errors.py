"""Defines the error of a structure that the service does not accept, and reads those of the grammar engine."""

import re

FORMATS = "date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid and uri"
"""The formats of strings that the engine follows."""

_UNSUPPORTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_REASONS = (
    ("Unsatisfiable", "the schema admits no value"),
    ("Unknown format", f"format: supported are {FORMATS}"),
    ("oneOf", "oneOf: its alternatives may overlap; give each a required property with a const of its own, or anyOf"),
    ("not disjoint", "patternProperties: a property may match two of them, which is not supported"),
    ("maxProperties", "minProperties and maxProperties: not supported beside properties that are not required"),
    ("circular", "$ref: a schema that refers to itself may have no keywords beside $ref"),
    ("Unresolvable", "$ref: it refers to nothing in this schema; other documents are not supported"),
    ("regex", "a regular expression is invalid or not supported (look-around and backreferences are not)"),
    *((sign, "it is too complex; make it simpler") for sign in ("fuel", "too many", "limit", "too big", "too large")),
)


class StructureError(ValueError):
    """A structure is invalid, too large, or admits no text. The message quotes nothing of it."""


def explained(error: str) -> str:
    """Returns the reason of an error of the engine, whose own message may quote the client's text."""
    if found := _UNSUPPORTED.search(error):
        return f"{found[1].replace(chr(34), '')}: not supported in a schema"
    return next(
        (reason for sign, reason in _REASONS if sign in error),
        "it is invalid, or the grammar engine does not support it",
    )
