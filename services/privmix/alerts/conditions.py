"""Decides which alerts follow from an observation of the service. Does no I/O."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from privmix.alerts.alert import Alert, AlertEvent
from privmix.budget.statement import Statement
from privmix.keys.records import KeyAccount, Share, ShareLimit, ShareUsage
from privmix.keys.traffic import TrafficReport
from privmix.requests.status import ShardReport

REARM = 0.1
"""A threshold can fire again once the fraction has fallen this far below it. Without this margin, tokens that an open
lease returns would make it fire twice."""


@dataclass(frozen=True)
class EnsembleState:
    """Holds the state of an ensemble at one moment. A field is None if its actor did not answer.

    `troubles` says why no private token can be generated and charged, by actor.
    """

    troubles: dict[str, str] = field(default_factory=dict)
    statement: Statement | None = None
    traffic: TrafficReport | None = None
    shards: Sequence[ShardReport] | None = None


class Conditions:
    """Fires an alert once when a condition begins and resolves it once when the condition ends.

    Only `levels` must survive a restart. It holds, for each condition that fires, the largest threshold that was
    passed, or the Unix time at which the problem began. Problems that have not yet lasted long enough for an alert are
    kept in memory only.
    """

    def __init__(
        self,
        ensemble: str,
        namespace: str,
        thresholds: Iterable[float],
        patience_s: float,
        levels: dict[str, float],
    ) -> None:
        self.levels = levels
        self._ensemble = ensemble
        self._namespace = namespace
        self._thresholds = sorted({*thresholds, 1.0})
        self._patience_s = patience_s
        self._suspected: dict[str, float] = {}
        self._released: int | None = None

    def evaluate(self, observation: EnsembleState, now: float) -> list[Alert]:
        """Returns the alerts that follow from an observation, and updates `levels`. `now` is in Unix seconds."""
        return [
            *self._budget(observation.statement),
            *self._problem("service.unavailable", observation.troubles, now),
            *self._stalled(observation.traffic, now),
            *self._unserved(observation.shards, now),
        ]

    def evaluate_shares(self, accounts: Sequence[KeyAccount]) -> list[Alert]:
        """Returns the alerts for all shares of keys and groups, and updates `levels`."""
        keys = {f"key {account.key.name}": account for account in accounts if account.key.revoked is None}
        groups = {f"group {account.key.group}": account for account in accounts if account.key.group is not None}
        alerts: list[Alert] = []
        for subject, account in keys.items():
            alerts += self._share(subject, account.share, account.usage)
        for subject, account in groups.items():
            if account.group_share is not None and account.group_usage is not None:
                alerts += self._share(subject, account.group_share, account.group_usage)
        return alerts

    def _budget(self, statement: Statement | None) -> Iterator[Alert]:
        if statement is None:
            return
        exhausted = statement.exhausted or statement.stopped
        if not exhausted and statement.tokens_left is None:
            return
        allowed = statement.tokens_charged + (statement.tokens_left or 0)
        fraction = 1.0 if exhausted else statement.tokens_charged / allowed
        numbers: dict[str, Any] = {"spent": statement.tokens_charged, "allowed": allowed}
        if statement.enforced == "bound" and statement.epsilon is not None:
            numbers |= {"epsilon_spent": statement.epsilon_spent, "epsilon": statement.epsilon}
        for threshold in self._passed("budget", fraction):
            if threshold < 1:
                text = f"{fraction:.0%} of the privacy budget of {{ensemble}} is spent."
                yield self._alert("budget.threshold", text, fraction=fraction, threshold=threshold, **numbers)
            else:
                text = "The privacy budget of {ensemble} is spent. It generates no more private tokens."
                yield self._alert("budget.exhausted", text, fraction=1.0, threshold=1.0, **numbers)

    def _share(self, subject: str, share: Share, usage: ShareUsage) -> Iterator[Alert]:
        """Returns the alerts for a share."""
        # Only spent tokens count, because a request may return the tokens that it holds.
        limits: tuple[tuple[ShareLimit, int | None, int, str], ...] = (
            ("tokens", share.tokens, usage.spent, ""),
            ("tokens_per_day", share.tokens_per_day, usage.spent_today, " of today"),
        )
        for limit, allowed, spent, when in limits:
            if not allowed:  # An empty share was never available, so it cannot become spent.
                continue
            fraction = min(1.0, spent / allowed)
            numbers = {"subject": subject, "limit": limit, "spent": spent, "allowed": allowed, "fraction": fraction}
            condition = f"share {limit} {subject}"
            for threshold in self._passed(condition, fraction):
                what = f"The share{when} that {subject} has of {{ensemble}}"
                if threshold < 1:
                    text = f"{what} is {fraction:.0%} spent: {spent} of {allowed} tokens."
                    yield self._alert("share.threshold", text, threshold=threshold, **numbers)
                else:
                    yield self._alert("share.exhausted", f"{what} is spent.", threshold=1.0, **numbers)

    def _passed(self, condition: str, fraction: float) -> list[float]:
        """Returns the thresholds that `fraction` has passed since the last evaluation."""
        level = self.levels.get(condition, 0.0)
        if fraction < level - REARM:
            level = max((threshold for threshold in self._thresholds if threshold <= fraction), default=0.0)
        passed = [threshold for threshold in self._thresholds if level < threshold <= fraction]
        self._set(condition, max([level, *passed]) or None)
        return passed

    def _stalled(self, traffic: TrafficReport | None, now: float) -> Iterator[Alert]:
        if traffic is None:
            return
        stalled = traffic.tokens == self._released and traffic.live + traffic.waiting > 0
        self._released = traffic.tokens
        text = f"{traffic.live} answers are running, {traffic.waiting} wait, and no token is released"
        yield from self._problem("service.stalled", {"traffic": text} if stalled else {}, now)

    def _unserved(self, shards: Sequence[ShardReport] | None, now: float) -> Iterator[Alert]:
        if shards is None:
            return
        served = {shard.parts for shard in shards if shard.answers}
        reasons = {
            shard.name: f"{len(shard.parts)} parts have no live copy" for shard in shards if shard.parts not in served
        }
        yield from self._problem("parts.unserved", reasons, now)

    def _problem(self, event: AlertEvent, reasons: dict[str, str], now: float) -> Iterator[Alert]:
        """Fires once `reasons` have not been empty for `patience_s`; resolves when they are empty again."""
        began = self.levels.get(event)
        if not reasons:
            self._suspected.pop(event, None)
            if began is not None:
                self._set(event, None)
                text = f"{{ensemble}} has recovered: {event} ended after {now - began:.0f} s."
                yield self._alert(event, text, status="resolved", seconds=round(now - began, 1))
        elif began is None:
            suspected = self._suspected.setdefault(event, now)
            if now - suspected >= self._patience_s:
                self._set(event, suspected)
                text = f"{{ensemble}}: {event}: {'; '.join(f'{actor}: {reason}' for actor, reason in reasons.items())}."
                yield self._alert(event, text, reasons=reasons, seconds=round(now - suspected, 1))

    def _set(self, condition: str, level: float | None) -> None:
        if level is None:
            self.levels.pop(condition, None)
        else:
            self.levels[condition] = level

    def _alert(self, event: AlertEvent, text: str, **fields: Any) -> Alert:
        name = self._ensemble
        text = text.replace("{ensemble}", name)
        return Alert(event=event, text=text, ensemble=name, namespace=self._namespace, **fields)
