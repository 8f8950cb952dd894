"""What the fleet measures for Prometheus, through Ray."""

from ray.util.metrics import Gauge


class FleetMetrics:
    """One gauge for each shard."""

    def __init__(self) -> None:
        self._healthy = Gauge("privmix_shard_healthy", "1 where a shard answers, else 0.", ("shard",))

    def probed(self, shard: str, answers: bool) -> None:
        """A shard was asked."""
        self._healthy.set(float(answers), {"shard": shard})
