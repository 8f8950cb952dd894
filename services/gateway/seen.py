"""What one gateway has seen of its traffic since it last said so: times and numbers only."""

from collections.abc import Mapping

from services.keys.messages import EnsembleTraffic, TrafficUpdate

MOST_TIMES = 200


class SeenTokens:
    """Of one ensemble."""

    def __init__(self) -> None:
        self._flow = EnsembleTraffic()

    def tokens(self, count: int) -> None:
        self._flow.tokens += count

    def first_token(self, seconds: float) -> None:
        if len(self._flow.first_token_s) < MOST_TIMES:
            self._flow.first_token_s.append(seconds)

    def take(self, live: int) -> EnsembleTraffic:
        """What was seen since the last call."""
        flow, self._flow = self._flow, EnsembleTraffic()
        flow.live = live
        return flow


class SeenRequests:
    """Of all ensembles, and of none: a request may be refused before it is known which one it asks."""

    def __init__(self) -> None:
        self._pulse = TrafficUpdate()

    def request(self) -> None:
        self._pulse.requests += 1

    def refused(self, code: str) -> None:
        self._pulse.refusals[code] = self._pulse.refusals.get(code, 0) + 1

    def take(self, ensembles: Mapping[str, EnsembleTraffic]) -> TrafficUpdate:
        """What was seen since the last call, with the ensembles of the ensembles."""
        pulse, self._pulse = self._pulse, TrafficUpdate()
        pulse.ensembles = dict(ensembles)
        return pulse
