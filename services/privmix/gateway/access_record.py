"""Holds what the access log shows of a request."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from privmix.gateway.answers import Answer

CLIENT_GONE = 499
"""The status in the log of a request whose client left before its response began."""


@dataclass
class AccessRecord:
    """Holds what the log shows of a request besides its route and duration. `key` is the id of the key."""

    request_id: str
    status: int = CLIENT_GONE
    key: str | None = None
    answer: Answer | None = None


def access_record(connection: HTTPConnection) -> AccessRecord:
    """Returns the record of a request, which its handler completes."""
    entry: AccessRecord = connection.scope["privmix.record"]
    return entry
