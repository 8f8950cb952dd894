"""Claim: there are as many gateways as nodes with shards, by the latest report. tests/k8s shows it on containers."""

from types import SimpleNamespace
from typing import Any

from privmix.gateway.autoscaling import NODES, one_for_each_node


def test_the_latest_report_says_how_many() -> None:
    early, late = SimpleNamespace(timestamp=1.0, value=5.0), SimpleNamespace(timestamp=2.0, value=3.0)
    context: Any = SimpleNamespace(raw_metrics={NODES: {"a": [early, late], "b": [early], "c": []}})
    assert one_for_each_node(context) == (3, {})


def test_without_a_report_the_number_stays() -> None:
    context: Any = SimpleNamespace(raw_metrics=None, target_num_replicas=4)
    assert one_for_each_node(context) == (4, {})
