"""Decides which errors are temporary, so that the failed work is repeated."""

from ray.exceptions import RayError, RayTaskError

from privmix.foundation.errors import CoordinatorError, LedgerError


def cause_of(error: BaseException) -> BaseException:
    """Returns the error that an actor raised, without Ray's wrapper, or the error itself."""
    return error.cause if isinstance(error, RayTaskError) else error


def is_temporary(error: BaseException) -> bool:
    """Returns whether the error is temporary: an actor, a node, a database or a connection does not answer now.

    An invalid request and a programming error are not temporary.
    """
    return isinstance(cause_of(error), CoordinatorError | LedgerError | RayError | OSError | TimeoutError)
