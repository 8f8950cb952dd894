"""The number of shards as Ray Serve knows numbers: whatever sets the replicas of a deployment sets it too."""

from contextlib import suppress

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

DEPLOYMENT = "shards"
CHECK_S = 5.0


@serve.deployment(name=DEPLOYMENT, ray_actor_options={"num_cpus": 0}, health_check_period_s=CHECK_S)
class ShardReplica:
    """Stands for one shard in Serve's books and does no work: the fleet owns the shards.

    A replica that fails makes no part leave: what counts is how many Serve has when it has all that it is to have.
    """

    def __init__(self, namespace: str, fleet: str) -> None:
        self._namespace = namespace
        self._fleet = fleet

    def check_health(self) -> None:
        """Serve's hook, called every `CHECK_S`; it never says that the replica is ill."""
        count = _settled_replicas(serve.get_replica_context().app_name)
        if count is None:
            return
        with suppress(RayError, ValueError):  # the fleet is away; there is a next time
            ray.get_actor(self._fleet, self._namespace).replicas.remote(count)


def _settled_replicas(application: str) -> int | None:
    """How many replicas this deployment has; None while Serve is still changing that."""
    try:
        overview = serve.status().applications[application].deployments[DEPLOYMENT]
    except (RayError, RayServeException, KeyError):
        return None
    if overview.status != "HEALTHY":
        return None
    running: int = overview.replica_states.get("RUNNING", 0)
    return running
