"""What one gateway has seen of its traffic since it last said so."""

from services.keys.messages import Pulse

MOST_TIMES = 200


class Seen:
    """Counts for the console; times and numbers only."""

    def __init__(self) -> None:
        self._pulse = Pulse()

    def request(self) -> None:
        self._pulse.requests += 1

    def tokens(self, count: int) -> None:
        self._pulse.tokens += count

    def first_token(self, seconds: float) -> None:
        if len(self._pulse.first_token_s) < MOST_TIMES:
            self._pulse.first_token_s.append(seconds)

    def refused(self, code: str) -> None:
        self._pulse.refusals[code] = self._pulse.refusals.get(code, 0) + 1

    def take(self, live: int) -> Pulse:
        """What was seen since the last call."""
        pulse, self._pulse = self._pulse, Pulse()
        pulse.live = live
        return pulse
