"""Which alerts a look at the service gives, after what was seen before. Arithmetic on plain data; no I/O."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from services.alerts.alert import Alert, Event
from services.budget.statement import Statement
from services.gateway.status import Shard
from services.keys.records import KeyAccount, Share, Usage
from services.keys.traffic import TrafficReport

REARM = 0.1
"""A threshold that was passed counts again once the fraction is this far below it: tokens of open leases come back."""

Limit = Literal["tokens", "tokens_per_day"]


@dataclass(frozen=True)
class Observation:
    """What one look at an ensemble found; None is what did not answer.

    `troubles` says why no private token can be made and charged, by actor.
    """

    troubles: dict[str, str] = field(default_factory=dict)
    statement: Statement | None = None
    traffic: TrafficReport | None = None
    shards: Sequence[Shard] | None = None


class Conditions:
    """Fires once when a condition begins, and says when it is over.

    `levels` is all that must survive a restart: for each condition that fires, the largest threshold it has passed, or
    the Unix time at which something began to be wrong. Times that are not yet an alert are in memory only.

    Args:
        prefix: of the names of these conditions in `levels`, which the ensembles of a service have together.
    """

    def __init__(
        self,
        ensemble: str,
        namespace: str,
        thresholds: Iterable[float],
        patience_s: float,
        levels: dict[str, float],
        prefix: str = "",
    ) -> None:
        self.levels = levels
        self._ensemble = ensemble
        self._namespace = namespace
        self._prefix = prefix
        self._thresholds = sorted({*thresholds, 1.0})
        self._patience_s = patience_s
        self._suspected: dict[str, float] = {}
        self._released: int | None = None

    def look(self, seen: Observation, now: float) -> list[Alert]:
        """Return the alerts of this look at the ensemble, and change `levels`. `now` is in Unix seconds."""
        return [
            *self._budget(seen.statement),
            *self._wrong("service.unavailable", seen.troubles, now),
            *self._stalled(seen.traffic, now),
            *self._unserved(seen.shards, now),
        ]

    def look_at_shares(self, accounts: Sequence[KeyAccount]) -> list[Alert]:
        """Return the alerts of the shares, of whichever ensembles they are, and change `levels`."""
        shares = {f"key {each.key.name}": each for each in accounts if each.key.revoked is None}
        groups = {f"group {each.key.group}": each for each in accounts if each.key.group is not None}
        alerts: list[Alert] = []
        for subject, account in shares.items():
            alerts += self._share(subject, account.share, account.usage)
            for ensemble, of in account.ensembles.items():
                alerts += self._share(subject, of.share, of.usage, ensemble)
        for subject, account in groups.items():
            if account.group_share is not None and account.group_usage is not None:
                alerts += self._share(subject, account.group_share, account.group_usage)
            for ensemble, of in account.group_ensembles.items():
                alerts += self._share(subject, of.share, of.usage, ensemble)
        return alerts

    def _budget(self, statement: Statement | None) -> Iterator[Alert]:
        if statement is None:
            return
        gone = statement.exhausted or statement.stopped
        if not gone and statement.tokens_left is None:
            return
        allowed = statement.tokens_charged + (statement.tokens_left or 0)
        fraction = 1.0 if gone else statement.tokens_charged / allowed
        numbers: dict[str, Any] = {"spent": statement.tokens_charged, "allowed": allowed}
        if statement.enforced == "bound" and statement.epsilon is not None:
            numbers |= {"epsilon_spent": statement.epsilon_spent, "epsilon": statement.epsilon}
        for threshold in self._passed("budget", fraction):
            if threshold < 1:
                text = f"{fraction:.0%} of the privacy budget of {{ensemble}} is spent."
                yield self._alert("budget.threshold", text, fraction=fraction, threshold=threshold, **numbers)
            else:
                text = "The privacy budget of {ensemble} is spent: it answers with no private token any more."
                yield self._alert("budget.exhausted", text, fraction=1.0, threshold=1.0, **numbers)

    def _share(self, subject: str, share: Share, usage: Usage, of: str | None = None) -> Iterator[Alert]:
        """Of a share of the ensemble `of`; None is one of all ensembles together."""
        # Tokens that are held may be given back, so what counts is spent.
        limits: tuple[tuple[Limit, int | None, int, str], ...] = (
            ("tokens", share.tokens, usage.spent, ""),
            ("tokens_per_day", share.tokens_per_day, usage.spent_today, " of today"),
        )
        for limit, allowed, spent, when in limits:
            if not allowed:  # a share of nothing is not spent
                continue
            fraction = min(1.0, spent / allowed)
            numbers = {"subject": subject, "limit": limit, "spent": spent, "allowed": allowed, "fraction": fraction}
            condition = f"share {limit} {subject}" if of is None else f"share {limit} {subject} of {of}"
            for threshold in self._passed(condition, fraction):
                what = f"The share{when} that {subject} has of {{ensemble}}"
                if threshold < 1:
                    text = f"{what} is {fraction:.0%} spent: {spent} of {allowed} tokens."
                    yield self._alert("share.threshold", text, of, threshold=threshold, **numbers)
                else:
                    yield self._alert("share.exhausted", f"{what} is spent.", of, threshold=1.0, **numbers)

    def _passed(self, condition: str, fraction: float) -> list[float]:
        """The thresholds that `fraction` has passed since the last look."""
        level = self.levels.get(self._prefix + condition, 0.0)
        if fraction < level - REARM:
            level = max((each for each in self._thresholds if each <= fraction), default=0.0)
        passed = [threshold for threshold in self._thresholds if level < threshold <= fraction]
        self._set(condition, max([level, *passed]) or None)
        return passed

    def _stalled(self, traffic: TrafficReport | None, now: float) -> Iterator[Alert]:
        if traffic is None:
            return
        stands = traffic.tokens == self._released and traffic.live + traffic.waiting > 0
        self._released = traffic.tokens
        text = f"{traffic.live} answers are under way, {traffic.waiting} wait, and no token is released"
        yield from self._wrong("service.stalled", {"traffic": text} if stands else {}, now)

    def _unserved(self, shards: Sequence[Shard] | None, now: float) -> Iterator[Alert]:
        if shards is None:
            return
        served = {shard.parts for shard in shards if shard.answers}
        reasons = {
            shard.name: f"{len(shard.parts)} parts have no live copy" for shard in shards if shard.parts not in served
        }
        yield from self._wrong("parts.unserved", reasons, now)

    def _wrong(self, event: Event, reasons: dict[str, str], now: float) -> Iterator[Alert]:
        began = self.levels.get(self._prefix + event)
        if not reasons:
            self._suspected.pop(event, None)
            if began is not None:
                self._set(event, None)
                text = f"{{ensemble}} has recovered: {event} is over after {now - began:.0f} s."
                yield self._alert(event, text, status="resolved", seconds=round(now - began, 1))
        elif began is None:
            suspected = self._suspected.setdefault(event, now)
            if now - suspected >= self._patience_s:
                self._set(event, suspected)
                text = f"{{ensemble}}: {event}: {'; '.join(f'{who}: {why}' for who, why in reasons.items())}."
                yield self._alert(event, text, reasons=reasons, seconds=round(now - suspected, 1))

    def _set(self, condition: str, level: float | None) -> None:
        if level is None:
            self.levels.pop(self._prefix + condition, None)
        else:
            self.levels[self._prefix + condition] = level

    def _alert(self, event: Event, text: str, of: str | None = None, **fields: Any) -> Alert:
        ensemble = of or self._ensemble
        written = text.replace("{ensemble}", ensemble)
        return Alert(event=event, text=written, ensemble=ensemble, namespace=self._namespace, **fields)
