"""Defines a psycopg connection that gives up a server which is silent for too long.

TCP timeouts do not help where the server's kernel acknowledges data and its process hangs, and libpq has no timeout for
statements on the client's side.
"""

import time
from contextlib import suppress
from typing import Any, TypeVar

from psycopg import Connection, OperationalError
from psycopg.abc import PQGen
from psycopg.waiting import Ready, Wait

SILENCE_S = 45.0
"""The longest silence in a statement. The server's own limits (`postgresql.STATEMENT_TIMEOUT`) end before it."""

CANCEL_S = 5.0
"""How long the client tries to tell the server that it has given up."""

T = TypeVar("T")


class LimitedConnection(Connection[Any]):
    """Closes when the server sends nothing for `SILENCE_S` during a statement, a commit or a rollback.

    It cancels the operation first. A commit that waits for a lost synchronous standby does not notice that its client
    has left, and would keep its locks: no statement timeout applies to a commit.
    """

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Runs an operation on the connection.

        Raises:
            OperationalError: the server is silent. The operation may have succeeded nevertheless.
        """
        try:
            return super().wait(_heard(gen, SILENCE_S), *args, **kwargs)
        except _SilentError:
            with suppress(OperationalError):
                self.cancel_safe(timeout=CANCEL_S)
            self.close()
            raise


class _SilentError(OperationalError):
    """The server is silent."""


def _heard(operation: PQGen[T], limit_s: float) -> PQGen[T]:
    """Yields what `operation` waits for. psycopg sends `Ready.NONE` several times a second while nothing happens."""
    try:
        wanted: Wait = next(operation)
        heard = time.monotonic()
        while True:
            ready: Ready | int = yield wanted
            if ready != Ready.NONE:
                heard = time.monotonic()
            elif time.monotonic() - heard > limit_s:
                raise _SilentError(
                    f"the server was silent for {limit_s:g} s: it hangs, or its synchronous standby does not answer"
                )
            wanted = operation.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result
