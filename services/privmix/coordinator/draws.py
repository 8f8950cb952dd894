"""Draws the models for the coming tokens of each sequence ahead of time: draws do not depend on data."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from privmix.privacy.protocol import Protocol

AHEAD = 2
"""The number of tokens to draw ahead, so that shards can load the adapters onto their devices in time."""


class DrawQueue:
    """Holds the draws for each sequence's next tokens, in order.

    A draw belongs to one token and stays at the head of its queue until that token is computed. A step that is repeated
    after a failure thus uses the same draws: a new draw would favour models whose shards do not fail.
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
        """Drops the current draws of sequences whose tokens are computed. Ignores sequences that have ended."""
        for sequence in sequences:
            if queue := self._queues.get(sequence):
                queue.popleft()

    def forget(self, sequences: Iterable[str]) -> None:
        """Drops every draw of sequences that have ended. Ignores unknown sequences."""
        for sequence in sequences:
            self._queues.pop(sequence, None)

    def _filled(self, sequence: str) -> deque[tuple[int, ...]]:
        queue = self._queues[sequence]
        while len(queue) <= AHEAD:
            queue.append(self._protocol.draw())
        return queue
