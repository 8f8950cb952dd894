"""Exports the fleet's Prometheus metrics through Ray."""

from ray.util.metrics import Gauge

from privmix.foundation.metrics import ENSEMBLE, of_ensemble


class FleetMetrics:
    """Records the health of each shard in a gauge."""

    def __init__(self, namespace: str) -> None:
        self._healthy = of_ensemble(
            Gauge("privmix_shard_healthy", "1 where a shard answers, else 0.", ("shard", ENSEMBLE)), namespace
        )

    def probed(self, shard: str, answers: bool) -> None:
        """Records the result of probing a shard."""
        self._healthy.set(float(answers), {"shard": shard})
