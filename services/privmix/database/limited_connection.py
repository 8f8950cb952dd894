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
MIGRATION_SILENCE_S = 960.0
"""The same where all of the content is migrated, which one statement or commit may do in silence."""

CANCEL_S = 5.0
"""How long the client tries to tell the server that it has given up."""

T = TypeVar("T")


class LimitedConnection(Connection[Any]):
    """Closes when the server sends nothing for `silence_s` during a statement, a commit or a rollback.

    It cancels the operation first. A commit that waits for a lost synchronous standby does not notice that its client
    has left, and would keep its locks: no statement timeout applies to a commit.
    """

    @property
    def silence_s(self) -> float:
        """The longest silence, in seconds."""
        return SILENCE_S

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Runs an operation on the connection.

        Raises:
            OperationalError: the server is silent. The operation may have succeeded nevertheless.
        """
        try:
            return super().wait(_heard(gen, self.silence_s), *args, **kwargs)
        except _SilentError:
            with suppress(OperationalError):
                self.cancel_safe(timeout=CANCEL_S)
            self.close()
            raise


class MigrationConnection(LimitedConnection):
    """Waits longer, while all of the content is migrated."""

    @property
    def silence_s(self) -> float:
        return MIGRATION_SILENCE_S


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
