"""Counts refusals and tokens of a gateway, for the traffic that it reports to the keys actor."""

from privmix.keys.messages import TrafficUpdate


class Counters:
    """Counts refusals and tokens since the last report."""

    def __init__(self) -> None:
        self._update = TrafficUpdate()

    def refused(self, code: str) -> None:
        """Counts a refusal by its error code."""
        self._update.refusals[code] = self._update.refusals.get(code, 0) + 1

    def tokens(self, count: int) -> None:
        """Counts released tokens."""
        self._update.tokens += count

    def take(self, live: int) -> TrafficUpdate:
        """Returns the counts since the last call. `live` is the current number of generations."""
        update, self._update = self._update, TrafficUpdate()
        update.live = live
        return update
