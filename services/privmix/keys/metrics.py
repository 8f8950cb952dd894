"""Exports the Prometheus metrics of shares through Ray."""

from collections.abc import Mapping

from ray.util.metrics import Gauge


class ShareMetrics:
    """Records the spent fraction of every share in a gauge."""

    def __init__(self) -> None:
        self._spent = Gauge("privmix_share_spent_ratio", "Tokens that a share has spent, of those it has.", ("share",))
        self._shown: dict[str, float] = {}

    def update(self, ratios: Mapping[str, float]) -> None:
        """Records `spent_ratios`. Sets removed limits to 0, because Ray cannot remove a series."""
        self._shown = dict.fromkeys(self._shown, 0.0) | dict(ratios)
        for name, ratio in self._shown.items():
            self._spent.set(ratio, {"share": f"key {name}"})
