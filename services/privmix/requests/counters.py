"""Counts requests and tokens of a gateway, for the traffic that it reports to the keys actor."""

from collections.abc import Mapping

from privmix.keys.messages import EnsembleTraffic, TrafficUpdate

MAX_TIMES = 200


class TokenCounters:
    """Counts the tokens of one ensemble."""

    def __init__(self) -> None:
        self._traffic = EnsembleTraffic()

    def tokens(self, count: int) -> None:
        """Counts released tokens."""
        self._traffic.tokens += count

    def first_token(self, seconds: float) -> None:
        """Records the time from a request to its first token."""
        if len(self._traffic.first_token_s) < MAX_TIMES:
            self._traffic.first_token_s.append(seconds)

    def take(self, live: int) -> EnsembleTraffic:
        """Returns the counts since the last call. `live` is the current number of generations."""
        traffic, self._traffic = self._traffic, EnsembleTraffic()
        traffic.live = live
        return traffic


class RequestCounters:
    """Counts requests of all ensembles together, because a request may be refused before its ensemble is known."""

    def __init__(self) -> None:
        self._update = TrafficUpdate()

    def request(self) -> None:
        self._update.requests += 1

    def refused(self, code: str) -> None:
        """Counts a refusal by its error code."""
        self._update.refusals[code] = self._update.refusals.get(code, 0) + 1

    def take(self, ensembles: Mapping[str, EnsembleTraffic]) -> TrafficUpdate:
        """Returns the counts since the last call, together with the traffic of the ensembles."""
        update, self._update = self._update, TrafficUpdate()
        update.ensembles = dict(ensembles)
        return update
