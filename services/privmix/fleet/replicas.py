"""Lets Ray Serve's replica count set the number of shards, so that Serve's tools and autoscaling work."""

from contextlib import suppress

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

DEPLOYMENT = "shards"
CHECK_S = 5.0


@serve.deployment(name=DEPLOYMENT, ray_actor_options={"num_cpus": 0}, health_check_period_s=CHECK_S)
class ShardReplica:
    """Represents one shard in Ray Serve and does no work: the fleet owns the shards.

    A failed replica does not remove its parts from the ensemble. The fleet follows the replica count only while Serve
    reports the deployment as healthy.
    """

    def __init__(self, namespace: str, fleet: str) -> None:
        self._namespace = namespace
        self._fleet = fleet

    def check_health(self) -> None:
        """Reports the replica count to the fleet. Serve calls it every `CHECK_S`; it never reports a failure."""
        count = _settled_replicas(serve.get_replica_context().app_name)
        if count is None:
            return
        with suppress(RayError, ValueError):  # the fleet does not answer; the next check repeats the report
            ray.get_actor(self._fleet, self._namespace).replicas.remote(count)


def _settled_replicas(application: str) -> int | None:
    """Returns the number of replicas; None while Serve is changing it."""
    try:
        overview = serve.status().applications[application].deployments[DEPLOYMENT]
    except (RayError, RayServeException, KeyError):
        return None
    if overview.status != "HEALTHY":
        return None
    running: int = overview.replica_states.get("RUNNING", 0)
    return running
