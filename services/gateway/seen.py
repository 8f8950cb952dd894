"""What one gateway has seen of its traffic since it last said so: times and numbers only."""

from collections.abc import Mapping

from services.keys.messages import Flow, Pulse

MOST_TIMES = 200


class SeenTokens:
    """Of one ensemble."""

    def __init__(self) -> None:
        self._flow = Flow()

    def tokens(self, count: int) -> None:
        self._flow.tokens += count

    def first_token(self, seconds: float) -> None:
        if len(self._flow.first_token_s) < MOST_TIMES:
            self._flow.first_token_s.append(seconds)

    def take(self, live: int) -> Flow:
        """What was seen since the last call."""
        flow, self._flow = self._flow, Flow()
        flow.live = live
        return flow


class SeenRequests:
    """Of all ensembles, and of none: a request may be refused before it is known which one it asks."""

    def __init__(self) -> None:
        self._pulse = Pulse()

    def request(self) -> None:
        self._pulse.requests += 1

    def refused(self, code: str) -> None:
        self._pulse.refusals[code] = self._pulse.refusals.get(code, 0) + 1

    def take(self, flows: Mapping[str, Flow]) -> Pulse:
        """What was seen since the last call, with the flows of the ensembles."""
        pulse, self._pulse = self._pulse, Pulse()
        pulse.flows = dict(flows)
        return pulse
