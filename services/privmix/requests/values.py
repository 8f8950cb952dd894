"""Parses what a request says outside its JSON body: numbers in headers, queries and forms, and texts in its address.

Nothing else parses them: a number is bounded before it is converted, which takes Python a time that grows with the
square of its digits, and a text is checked before a database sees it.
"""

from typing import Annotated

from pydantic import AfterValidator, Field
from starlette.requests import HTTPConnection, Request

from privmix.requests.errors import invalid
from privmix.requests.schema import refused

MAX_DIGITS = 15
MAX_CHARACTERS = 512
MAX_COUNT = 2**53 - 1
"""The largest number of tokens or requests of a limit. JavaScript and every database can hold it."""


def whole_number(text: str, param: str, least: int, most: int = MAX_COUNT) -> int:
    """Parses a number in decimal ASCII digits.

    Raises:
        ApiError: 400, the text is not a number from `least` to `most`.
    """
    if len(text) <= MAX_DIGITS and text.isascii() and text.isdecimal() and least <= int(text) <= most:
        return int(text)
    raise invalid(param, f"give a number from {least} to {most}")


def declared_bytes(connection: HTTPConnection) -> int:
    """Returns the length of the body that the header `content-length` declares; 0 without one.

    Raises:
        ApiError: 400, the header is not a number of at most `MAX_DIGITS` digits.
    """
    declared = connection.headers.get("content-length")
    return 0 if declared is None else whole_number(declared, "content-length", 0)


async def check_address(request: Request) -> None:
    """Checks the ids and names in the path and the query of a request. Every route depends on it.

    Raises:
        ApiError: 400, one of them is too long or has control characters, which no id or name has.
    """
    texts = [(name, str(text)) for name, text in request.path_params.items()]
    for name, text in texts + [("query", text) for item in request.query_params.multi_items() for text in item]:
        if len(text) > MAX_CHARACTERS:
            raise invalid(name, f"a text in it has more than {MAX_CHARACTERS} characters; shorten it")
        if _has_control_characters(text):
            raise invalid(name, "it has control characters; remove them")


def _is_name(text: str) -> str:
    if _has_control_characters(text):
        raise refused("invalid_value", "it has control characters; remove them")
    return text


def _has_control_characters(text: str) -> bool:
    return any(character < " " or character == "\x7f" for character in text)


Name = Annotated[str, AfterValidator(_is_name)]
"""The name of a key, a group or an owner in a body."""
BoundedCount = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(gt=0, le=MAX_COUNT)]
