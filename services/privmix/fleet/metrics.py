"""Exports the fleet's Prometheus metrics through Ray."""

from privmix.foundation.metrics import EnsembleMetrics


class FleetMetrics:
    """Records the health of each shard in a gauge."""

    def __init__(self, namespace: str) -> None:
        metrics = EnsembleMetrics(namespace)
        self._healthy = metrics.gauge("privmix_shard_healthy", "1 where a shard answers, else 0.", "shard")

    def probed(self, shard: str, answers: bool) -> None:
        """Records the result of probing a shard."""
        self._healthy.set(float(answers), {"shard": shard})
