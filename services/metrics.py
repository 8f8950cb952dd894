"""Labels Prometheus metrics with the ensemble to which they belong."""

from typing import TypeVar

import ray
from ray.util.metrics import Metric

ENSEMBLE = "ensemble"
"""The label's name. Its value is the Ray namespace of the ensemble's actors."""

AnyMetric = TypeVar("AnyMetric", bound=Metric)


def of_ensemble(metric: AnyMetric) -> AnyMetric:
    """Sets the label of a metric to this actor's namespace. The metric must have the tag `ENSEMBLE`."""
    if ray.is_initialized():
        metric.set_default_tags({ENSEMBLE: ray.get_runtime_context().namespace})
    return metric
