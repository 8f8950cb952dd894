"""Says how many gateways Ray Serve runs in a cluster. Serve's controller imports it, so it imports little."""

from typing import Any

from ray.serve.config import AutoscalingContext

NODES = "nodes"
"""The metric of a gateway that says on how many nodes shards are."""


def one_for_each_node(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Returns how many nodes have shards: a policy of Serve's autoscaling, so that each of them gets a gateway.

    Serve's HAProxy runs only on nodes with a gateway, and Kubernetes sends no clients to the others.
    """
    reports = [series[-1] for series in (context.raw_metrics or {}).get(NODES, {}).values() if series]
    last = max(reports, key=lambda report: report.timestamp, default=None)
    return context.target_num_replicas if last is None else int(last.value), {}
