"""Draws for the coming tokens of each sequence, made ahead: they do not depend on data."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from services.privacy.protocol import Protocol

AHEAD = 2
"""Tokens for which draws are made ahead, so that shards can bring the adapters to their devices."""


class DrawQueue:
    """Holds the draws of each sequence's next tokens, in order.

    A draw belongs to one token. It stays at the head of its queue until that token is made, so a step that is repeated
    after a failure uses the same draws: a new draw would favour the models whose shards do not fail.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._queues: dict[str, deque[tuple[int, ...]]] = defaultdict(deque)

    def current(self, sequence: str) -> tuple[int, ...]:
        """Returns the draw for the next token of this sequence."""
        return self._filled(sequence)[0]

    def coming(self, sequence: str) -> Sequence[tuple[int, ...]]:
        """Returns the draws for the `AHEAD` tokens after the next one."""
        return tuple(self._filled(sequence))[1:]

    def advance(self, sequences: Iterable[str]) -> None:
        """Drop the current draws of sequences whose tokens are made. Some may have ended during the step."""
        for sequence in sequences:
            if queue := self._queues.get(sequence):
                queue.popleft()

    def forget(self, sequences: Iterable[str]) -> None:
        """Drop every draw of sequences that have ended. Unknown sequences are no error."""
        for sequence in sequences:
            self._queues.pop(sequence, None)

    def _filled(self, sequence: str) -> deque[tuple[int, ...]]:
        queue = self._queues[sequence]
        while len(queue) <= AHEAD:
            queue.append(self._protocol.draw())
        return queue
