"""Which errors pass: the one place that decides whether work that failed is tried again."""

from ray.exceptions import RayError, RayTaskError

from services.budget.errors import LedgerError
from services.coordinator.messages import CoordinatorError


def cause_of(error: BaseException) -> BaseException:
    """Return what an actor raised, which Ray wraps, or the error itself."""
    return error.cause if isinstance(error, RayTaskError) else error


def passes(error: BaseException) -> bool:
    """Return whether the same work can succeed later: an actor, a node, a database or a connection is away for now.

    A request that an actor refuses as it is does not pass, nor does a defect.
    """
    return isinstance(cause_of(error), CoordinatorError | LedgerError | RayError | OSError | TimeoutError)
