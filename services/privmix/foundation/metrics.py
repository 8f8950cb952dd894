"""Labels Prometheus metrics with the ensemble to which they belong."""

from typing import TypeVar

from ray.util.metrics import Metric

ENSEMBLE = "ensemble"
"""The label's name. Its value is the Ray namespace of the ensemble's actors."""

AnyMetric = TypeVar("AnyMetric", bound=Metric)


def of_ensemble(metric: AnyMetric, namespace: str) -> AnyMetric:
    """Sets the label of a metric to the namespace of this actor. The metric must have the tag `ENSEMBLE`.

    Ray's runtime context does not know it: there, the namespace is that of the process that started the actor.
    """
    metric.set_default_tags({ENSEMBLE: namespace})
    return metric
