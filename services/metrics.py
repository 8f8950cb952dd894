"""The label by which Prometheus tells the ensembles of a service apart."""

from typing import TypeVar

import ray
from ray.util.metrics import Metric

ENSEMBLE = "ensemble"
"""The Ray namespace of the ensemble's actors: the service's own, or `SERVICE.NAME` for one of `ensembles`."""

AnyMetric = TypeVar("AnyMetric", bound=Metric)


def of_ensemble(metric: AnyMetric) -> AnyMetric:
    """Label what this actor measures; `ENSEMBLE` is among the metric's tags."""
    if ray.is_initialized():
        metric.set_default_tags({ENSEMBLE: ray.get_runtime_context().namespace})
    return metric
