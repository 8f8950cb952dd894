"""What was away is waited for; what would fail again is not."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, RayTaskError

from services.budget.errors import Fenced, LeaseRefused, LedgerUnavailable
from services.coordinator.messages import Overloaded, Unavailable
from services.coordinator.recovery import passes


def raised_by_an_actor(error: Exception) -> RayTaskError:
    return RayTaskError("method", "traceback", error).as_instanceof_cause()


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("shard 3"),
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
def test_what_is_away_passes(error: Exception) -> None:
    assert passes(error)


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
def test_what_would_fail_again_does_not_pass(error: Exception) -> None:
    assert not passes(error)
