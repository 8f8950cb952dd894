"""Makes Prometheus metrics that have the ensemble to which they belong as a label."""

from ray.util.metrics import Counter, Gauge, Histogram

ENSEMBLE = "ensemble"
"""The label's name. Its value is the Ray namespace of the ensemble's actors."""


class EnsembleMetrics:
    """Makes the metrics of an actor in a namespace, with further labels by their names.

    Ray's runtime context does not know the namespace: there, it is that of the process that started the actor.
    """

    def __init__(self, namespace: str) -> None:
        self._tags = {ENSEMBLE: namespace}

    def counter(self, name: str, description: str, *labels: str) -> Counter:
        made = Counter(name, description, (*labels, ENSEMBLE))
        made.set_default_tags(self._tags)
        return made

    def gauge(self, name: str, description: str, *labels: str) -> Gauge:
        made = Gauge(name, description, (*labels, ENSEMBLE))
        made.set_default_tags(self._tags)
        return made

    def histogram(self, name: str, description: str, boundaries: list[float]) -> Histogram:
        made = Histogram(name, description, boundaries, (ENSEMBLE,))
        made.set_default_tags(self._tags)
        return made
