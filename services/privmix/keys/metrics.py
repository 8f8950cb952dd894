"""Exports the Prometheus metrics of shares through Ray."""

from collections.abc import Iterable

from ray.util.metrics import Gauge

from privmix.keys.records import KeyAccount, Share, ShareUsage

ALL = "all"
"""The label `model` of a share that applies to all ensembles together."""


class ShareMetrics:
    """Records the spent fraction of every limit of every share in a gauge."""

    def __init__(self) -> None:
        self._spent = Gauge(
            "privmix_share_spent_ratio", "Tokens that a share has spent, of those it has.", ("share", "limit", "model")
        )
        self._shown: set[tuple[str, str, str]] = set()

    def update(self, accounts: Iterable[KeyAccount]) -> None:
        """Records the usage of all shares. Sets removed limits to 0, because Ray cannot remove a series."""
        ratios: dict[tuple[str, str, str], float] = dict.fromkeys(self._shown, 0.0)
        for account in accounts:
            if account.key.revoked is None:
                name = f"key {account.key.name}"
                ratios |= _ratios(name, ALL, account.share, account.usage)
                for model, part in account.ensembles.items():
                    ratios |= _ratios(name, model, part.share, part.usage)
            if account.group_share is not None and account.group_usage is not None:
                name = f"group {account.key.group}"
                ratios |= _ratios(name, ALL, account.group_share, account.group_usage)
                for model, part in account.group_ensembles.items():
                    ratios |= _ratios(name, model, part.share, part.usage)
        self._shown |= ratios.keys()
        for (share, limit, model), ratio in ratios.items():
            self._spent.set(ratio, {"share": share, "limit": limit, "model": model})


def _ratios(name: str, model: str, share: Share, usage: ShareUsage) -> dict[tuple[str, str, str], float]:
    limits = {"tokens": (usage.spent, share.tokens), "tokens_per_day": (usage.spent_today, share.tokens_per_day)}
    return {(name, limit, model): spent / allowed for limit, (spent, allowed) in limits.items() if allowed}
