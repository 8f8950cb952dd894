"""Follows one text through a grammar: which tokens may follow, and which must."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from privmix.structure.ending import PIECE, EndFinder
from privmix.structure.errors import StructureError
from privmix.structure.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Position:
    """Describes what follows some tokens. It is public: the grammar and the tokens decide it.

    Attributes:
        forced: the tokens that follow without an alternative, in order. Each is the only legal token at its place.
        legal: the tokens that may follow `forced`: bit i % 8 of byte i // 8 is set for token i. Bytes without a legal
            token are absent at the end. Empty if the text is complete, so that nothing may follow.
        end: tokens that complete the text after `forced`, few if the engine finds them (`EndFinder`). None if none are
            known, or if the limit cut `forced`.
    """

    forced: tuple[int, ...]
    legal: bytes
    end: tuple[int, ...] | None = None

    @property
    def complete(self) -> bool:
        return not self.legal

    @property
    def shortest(self) -> int | None:
        """The number of tokens that complete the text, as far as they are known."""
        return None if self.end is None else len(self.forced) + len(self.end)


class Matcher:
    """Computes positions in texts of one grammar. A position depends on the grammar, the tokens and the limit alone.

    So it tells nothing of other answers, or of tokens that were sampled and taken back. Therefore each matcher has an
    engine of its own, because copies would share a lexer, whose states and their limit accumulate. And it brings the
    engine to a text by one path only: from the beginning, with a mask at each place, and forced tokens in pieces.
    Masks make most of the states of the lexer. So an engine that reaches a limit is replaced by a new one, which reads
    the text in pieces with fewer masks; two of them within `PIECE` tokens are the end.

    A longer text costs only its new tokens; any other text starts again. Not thread-safe.

    Args:
        compile_: returns a new engine at the beginning of a text.
        find_end: returns a new finder of ends.
    """

    def __init__(
        self, compile_: Callable[[], LLMatcher], vocabulary: Vocabulary, find_end: Callable[[], EndFinder]
    ) -> None:
        self._compile = compile_
        self._vocabulary = vocabulary
        self._find_end = find_end
        self._restart()

    def after(self, tokens: Sequence[int], limit: int | None = None) -> Position:
        """Returns the position after these tokens of the text.

        Args:
            limit: the maximum number of forced tokens.

        Raises:
            StructureError: the grammar does not admit the tokens, nothing may follow them although they are not a
                complete text, or a step exceeds a limit of the engine.
        """
        tokens = tuple(tokens)
        if self._engine.is_error() or len(tokens) < self._chosen or not _agree(tokens, self._text):
            self._restart()
        while len(self._text) < len(tokens):
            if not self._force():
                self._end()
                self._choose(tokens[len(self._text)])
            elif not _agree(tokens, self._text):
                raise StructureError("the grammar does not admit this text")
        end = len(tokens) if limit is None else len(tokens) + limit
        while (limit is None or len(self._text) <= end) and self._force():
            pass
        forced = self._text[len(tokens) :][:limit]
        if limit is not None and len(self._text) > end:
            return Position(forced, _bytes(1 << self._text[end]))
        return Position(forced, _bytes(self._legal()), self._end())

    def _restart(self) -> None:
        self._engine = self._compile()
        self._renewed = 0  # the length of the text when the engine was new
        self._text: tuple[int, ...] = ()
        self._chosen = 0  # the tokens after this place are forced
        self._run: list[int] = []  # forced tokens that the engine has not consumed
        self._known: int | None = None  # the legal tokens after the text
        self._ending: EndFinder | None = None

    def _choose(self, token: int) -> None:
        self._consume((token,))
        self._chosen = len(self._text)

    def _force(self) -> bool:
        """Consumes a piece of the forced tokens that follow; returns whether there were any."""
        if not self._run:
            legal = self._legal()
            if not legal or legal & (legal - 1):
                return False
            # The engine returns a whole run. To compute the legal tokens after each of them takes quadratic time.
            self._run = self._engine.compute_ff_tokens() or [legal.bit_length() - 1]
        piece, self._run = self._run[:PIECE], self._run[PIECE:]
        self._consume(piece)
        self._legal()
        return True

    def _consume(self, tokens: Sequence[int]) -> None:
        if not (
            self._engine.consume_tokens(list(tokens)) or (self._renew() and self._engine.consume_tokens(list(tokens)))
        ):
            raise StructureError("the grammar does not admit this text, or it is too complex")
        self._text += tuple(tokens)
        self._known = None

    def _legal(self) -> int:
        """Returns the bits of the legal tokens; 0 if only the end may follow, so that it needs no token."""
        if self._known is None:
            legal = self._mask()
            if self._engine.is_error() and self._renew():
                legal = self._mask()
            if not legal & ~self._vocabulary.ends:
                if self._engine.is_error() or not self._engine.is_accepting():
                    raise StructureError("no text of this model's tokens matches, or it is too complex")
                legal = 0
            self._known = legal
        return self._known

    def _end(self) -> tuple[int, ...] | None:
        """Returns an end of the text. It depends on the text alone, as each place with an alternative calls this."""
        if not self._legal():
            return ()
        if self._ending is None:
            self._ending = self._find_end()
        return self._ending.after(self._text)

    def _mask(self) -> int:
        return 0 if self._engine.is_stopped() else int.from_bytes(self._engine.compute_bitmask(), "little")

    def _renew(self) -> bool:
        """Replaces the engine by a new one after the same text. Returns whether it may have helped."""
        if len(self._text) < self._renewed + PIECE:
            return False
        self._engine, self._renewed = self._compile(), len(self._text)
        for begin in range(0, len(self._text), PIECE):
            self._engine.consume_tokens(list(self._text[begin : begin + PIECE]))
            self._mask()
        return not self._engine.is_error()


def _bytes(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Tells whether one text is the beginning of the other."""
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]
