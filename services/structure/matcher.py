"""Follows one text through a grammar: which tokens may follow, and which must."""

from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from services.structure.errors import StructureError
from services.structure.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Position:
    """Describes what follows some tokens.

    Attributes:
        forced: the tokens that follow without an alternative, in order. Each is the only legal token at its place.
        legal: the tokens that may follow `forced`: bit i % 8 of byte i // 8 is set for token i. Bytes without a legal
            token are absent at the end. Empty if the text is complete, so that nothing may follow.
    """

    forced: tuple[int, ...]
    legal: bytes

    @property
    def complete(self) -> bool:
        return not self.legal


class Matcher:
    """Computes positions in texts of one grammar. A position depends on the grammar and the tokens alone.

    It keeps the state after the latest tokens, so that a longer text costs only its new tokens. Not thread-safe.
    """

    def __init__(self, compiled: LLMatcher, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._ends = vocabulary.ends
        self._restart()

    def after(self, tokens: Sequence[int], limit: int | None = None) -> Position:
        """Returns the position after these tokens of the text.

        Args:
            limit: the maximum number of forced tokens.

        Raises:
            StructureError: the grammar does not admit the tokens, nothing may follow them although they are not a
                complete text, or a step exceeds a limit of the engine.
        """
        self._follow(tuple(tokens))
        forced: list[int] = []
        while True:
            legal = self._legal()
            if legal & (legal - 1) or not legal or len(forced) == limit:
                return Position(tuple(forced), legal.to_bytes((legal.bit_length() + 7) // 8, "little"))
            # The engine returns a whole run. To compute the legal tokens after each of them takes quadratic time.
            run = self._matcher.compute_ff_tokens() or [legal.bit_length() - 1]
            run = run if limit is None else run[: limit - len(forced)]
            self._consume(run)
            forced += run

    def _restart(self) -> None:
        self._matcher = self._compiled.deep_copy()
        self._consumed: tuple[int, ...] = ()

    def _follow(self, tokens: tuple[int, ...]) -> None:
        """Brings the state to these tokens: consumes those that are new, or starts again for another text."""
        if self._matcher.is_error() or tokens[: len(self._consumed)] != self._consumed:
            self._restart()
        self._consume(tokens[len(self._consumed) :])

    def _consume(self, tokens: Sequence[int]) -> None:
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            raise StructureError("the grammar does not admit this text, or it is too complex")
        self._consumed += tuple(tokens)

    def _legal(self) -> int:
        """Returns the bits of the legal tokens; 0 if only the end may follow, so that it needs no token."""
        legal = 0 if self._matcher.is_stopped() else int.from_bytes(self._matcher.compute_bitmask(), "little")
        if not legal & ~self._ends:
            if self._matcher.is_error() or not self._matcher.is_accepting():
                raise StructureError("no text of this model's tokens matches, or it is too complex")
            return 0
        return legal
