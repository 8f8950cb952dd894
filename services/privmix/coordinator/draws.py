"""Draws the models for the next token of each sequence: draws do not depend on data."""

from collections.abc import Iterable

from privmix.privacy.protocol import Protocol


class Draws:
    """Holds the draw for each sequence's next token.

    A draw belongs to one token and stays until that token is computed. A step that is repeated after a failure thus
    uses the same draws: a new draw would favour models whose shards do not fail.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._current: dict[str, tuple[int, ...]] = {}

    def current(self, sequence: str) -> tuple[int, ...]:
        """Returns the draw for the next token of this sequence."""
        if sequence not in self._current:
            self._current[sequence] = self._protocol.draw()
        return self._current[sequence]

    def drop(self, sequences: Iterable[str]) -> None:
        """Drops the draws of sequences whose tokens are computed, or that have ended. Ignores those without a draw."""
        for sequence in sequences:
            self._current.pop(sequence, None)
