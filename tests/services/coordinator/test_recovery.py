"""Claim: the coordinator waits after an error that can pass, and not after one that would repeat."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, RayTaskError

from privmix.coordinator.recovery import is_temporary
from privmix.foundation.errors import (
    CoordinatorUnavailable,
    Fenced,
    LeaseRefused,
    LedgerUnavailable,
    Overloaded,
)


def raised_by_an_actor(error: Exception) -> RayTaskError:
    return RayTaskError("method", "traceback", error).as_instanceof_cause()


@pytest.mark.parametrize(
    "error",
    [
        CoordinatorUnavailable("shard 3"),
        LedgerUnavailable("no connection"),
        Fenced("another has it"),
        ActorDiedError(),
        ActorUnavailableError("restarting", None),
        NodeDiedError("gone"),
        TimeoutError(),
        ConnectionResetError(),
        raised_by_an_actor(Overloaded()),
        raised_by_an_actor(LedgerUnavailable("no connection")),
    ],
    ids=repr,
)
def test_an_error_of_an_absent_actor_passes(error: Exception) -> None:
    assert is_temporary(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a context too long"),
        KeyError("a defect"),
        RuntimeError("out of memory"),
        raised_by_an_actor(LeaseRefused("a bad count")),
        raised_by_an_actor(KeyError("a defect")),
    ],
    ids=repr,
)
def test_a_repeatable_error_does_not_pass(error: Exception) -> None:
    assert not is_temporary(error)
