"""Exports the Prometheus metrics of shares through Ray."""

from collections.abc import Iterable

from ray.util.metrics import Gauge

from privmix.keys.records import KeyAccount


class ShareMetrics:
    """Records the spent fraction of every limit of every share in a gauge."""

    def __init__(self) -> None:
        self._spent = Gauge(
            "privmix_share_spent_ratio", "Tokens that a share has spent, of those it has.", ("share", "limit")
        )
        self._shown: set[tuple[str, str]] = set()

    def update(self, accounts: Iterable[KeyAccount]) -> None:
        """Records the usage of all shares. Sets removed limits to 0, because Ray cannot remove a series."""
        ratios: dict[tuple[str, str], float] = dict.fromkeys(self._shown, 0.0)
        for account in accounts:
            if account.key.revoked is None:
                ratios |= _ratios(account)
        self._shown |= ratios.keys()
        for (share, limit), ratio in ratios.items():
            self._spent.set(ratio, {"share": share, "limit": limit})


def _ratios(account: KeyAccount) -> dict[tuple[str, str], float]:
    share, usage = account.key.share, account.usage
    limits = {"tokens": (usage.spent, share.tokens), "tokens_per_day": (usage.spent_today, share.tokens_per_day)}
    return {
        (f"key {account.key.name}", limit): spent / allowed for limit, (spent, allowed) in limits.items() if allowed
    }
