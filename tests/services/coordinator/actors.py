"""The actors of the tests of coordinators. One process has the budgets of all tests, because it starts in seconds and
opens a ledger in milliseconds."""

from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from privmix.budget.actor import NAME, Budget
from privmix.budget.privacy_budget import PrivacyBudget

NAMESPACE = "coordinators"
"""The namespace of all actors of these tests."""


class SuccessiveBudgets(Budget):
    """The budget's actor, for one ledger after another."""

    def __init__(self) -> None:
        """Opens no ledger: `begin` opens the first one."""

    def begin(self, ledger: str, terms: PrivacyBudget) -> None:
        super().__init__(ledger, terms, True, {"holder": uuid4().hex}, NAMESPACE, {})
        self.ready()


_Actor = ray.remote(num_cpus=0, concurrency_groups={"writes": 32, "statements": 1, "health": 1})(SuccessiveBudgets)


def open_budget(ledger: Path, terms: PrivacyBudget) -> ActorHandle:
    """Opens a new ledger in the budget's actor of this cluster, which has the name `NAME`, and returns the actor."""
    options = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    actor: ActorHandle = _Actor.options(**options).remote()
    ray.get(actor.begin.remote(str(ledger), terms))
    return actor


def end(shard: ActorHandle) -> None:
    """Ends a shard and waits until its name is free."""
    ray.kill(shard)
    with suppress(RayActorError):
        while True:
            ray.get(shard.status.remote())
