"""Finds how a text of a grammar can end soon, so that an answer ends well before its tokens are used up.

The search works on bytes, because a few bytes may follow where thousands of tokens may. It is a heuristic: a shorter
end may exist. But what it returns is true, because the grammar's engine has read each end and accepted it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from string import ascii_lowercase, ascii_uppercase, digits
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher

from privmix.structure.vocabulary import Vocabulary

PIECE = 64
"""The maximum number of tokens between two masks, because the engine renews its fuel at masks only."""
MAX_TOKENS = 4096
"""The maximum number of tokens of an end."""
MAX_PATH = 16 * MAX_TOKENS
"""The maximum number of bytes in which a search looks for it."""
NEAR_STATES = 48
"""The states that a search visits in the order of their costs at first. Most values end within them."""
HINTED_STATES = 128
"""The states that it visits with hints."""
UNHINTED = 16
"""What another byte costs more than a hint, where one may follow."""
MAX_RENEWALS = 4
"""How often an engine is replaced that has reached a limit, for one token."""
MAX_STEPS = 2000
"""The states that it visits straight ahead, if it has found no end near."""
FAR_STATES = 500
"""The states that it visits in the order of their costs at last, with more choice."""
TRIED = 64
"""How many bytes at the beginning of the known end a search tries to leave out."""

_LEADING = b"}]),:"
"""Bytes that close something, or lead on to what is required."""
_FIRST = _LEADING + b";>\"'0123456789"
"""Bytes that are tried first: those, and short values."""
_LAST = b"-.[{("
"""Bytes that are tried last, because something must follow them."""
_IN_STRINGS = b'"\n-@'
"""What is tried of all marks in a string in which any may follow: those that may end it, one that takes few
tokens if it is repeated, and one that addresses need."""
_MANY = 24
"""If more bytes than this may follow, it is inside a string."""
_KINDS = (ascii_lowercase.encode(), digits.encode(), ascii_uppercase.encode())
_MARKS = 8
"""If more bytes than this that are no letters and digits may follow, any may."""
FILLINGS = (4, 16, 64)
"""How often a byte is repeated at once inside a string that may not end yet."""

T = TypeVar("T")
Path = tuple[int, ...]
"""What a search has read after the text: bytes, or tokens, of which those that were chosen have one byte each."""


class EndFinder:
    """Knows an end of a text while the text grows: tokens that complete it.

    An end depends on the grammar and on the texts of all calls. The engine is its own, so that a search changes nothing
    for the matcher.

    Args:
        compile_: returns a new engine at the beginning of a text.
        vocabulary: that of the texts and of their ends.
        letters: that of the engine, which may be `BYTES`.
        hints: returns strings that may lead out of free text (`hints`).
    """

    def __init__(
        self,
        compile_: Callable[[], LLMatcher],
        vocabulary: Vocabulary,
        letters: Vocabulary | None = None,
        hints: Callable[[], Sequence[bytes]] = lambda: (),
    ) -> None:
        self._compile = compile_
        self._read_hints = hints
        self._tokenizer = vocabulary.tokenizer
        self._letters = letters
        self._byte_tokens = {byte: (letters or vocabulary).byte_tokens[byte] for byte in vocabulary.byte_tokens}
        self._bytes = tuple(self._byte_tokens)
        self._places = np.array(tuple(self._byte_tokens.values()), dtype=np.int64)
        self._leading = frozenset(self._bytewise(_LEADING))
        self._reader = _Reader(compile_())
        self._renewals = 0
        self._choices: dict[tuple[bytes, bool], _Moves] = {}
        self._text: tuple[int, ...] | None = None
        self._known: bytes | None = b""
        self._tokens: tuple[int, ...] = ()

    def know(self, text: tuple[int, ...], end: tuple[int, ...]) -> None:
        """Takes the end of a text that `after` returned where the same grammar was searched before."""
        self._text, self._known, self._tokens = text, self._tokenizer.decode_bytes(list(end)), end
        try:
            self._read(text)
        except _EngineError:
            self._known = None

    def after(self, text: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns an end of a text that extends the text of the previous call. None if none was found, now or before.

        Args:
            text: tokens that the grammar admits.
        """
        if self._known is not None and text != self._text:
            known, new, self._text = self._known, text[len(self._text or ()) :], text
            self._renewals = 0
            try:
                self._known = self._grown(known, new)
            except _EngineError:
                self._known = None
            if self._known is not None and self._known != known:
                self._tokens = self._tokenized(self._known)
            if len(self._tokens) > MAX_TOKENS:
                self._known = None
        return None if self._known is None else self._tokens

    def _grown(self, known: bytes, new: tuple[int, ...]) -> bytes | None:
        """Returns an end after the new tokens, where `known` was an end before them."""
        self._read(new)
        added = self._tokenizer.decode_bytes(list(new))
        if added and known.startswith(added):
            return known[len(added) :]
        return self._found(known)

    def _read(self, new: tuple[int, ...]) -> None:
        """Reads the last tokens of the text."""
        try:
            self._reader.extend(self._spelled(new))
        except _EngineError:
            self._renew()

    def _renew(self) -> None:
        """Replaces an engine that has reached a limit."""
        if self._renewals == MAX_RENEWALS:
            raise _EngineError
        self._renewals += 1
        self._reader = _Reader(self._compile())
        self._reader.extend(self._spelled(self._text or ()))

    def _spelled(self, text: tuple[int, ...]) -> Path:
        """Returns a text as the engine reads it."""
        return text if self._letters is None else tuple(self._tokenizer.decode_bytes(list(text)))

    def _found(self, known: bytes) -> bytes | None:
        """Searches an end. Wherever the search comes, it tries the known end, which the new tokens seldom change."""
        goal = self._bytewise(known)
        path = self._near(goal, NEAR_STATES)
        if path is None:
            path = self._far(goal)
        return None if path is None else self._text_of(path)

    def _far(self, goal: Path) -> Path | None:
        """Returns an end that is not near."""
        searches: list[Callable[[], Path | None]] = [
            lambda: self._ahead(goal),
            lambda: self._near(goal, HINTED_STATES, hints=self._hints) if self._hints else None,
            lambda: self._near(goal, FAR_STATES, every=True),
        ]
        if self._visit((), goal)[1].inside:  # free text, which goes on straight ahead
            searches[:2] = reversed(searches[:2])
        return next((path for search in searches if (path := search()) is not None), None)

    def _text_of(self, path: Path) -> bytes:
        return self._tokenizer.decode_bytes(list(path)) if self._letters is None else bytes(path)

    @cached_property
    def _hints(self) -> list[Path]:
        return [hint for text in self._read_hints() if (hint := self._bytewise(text))]

    def _near(self, goal: Path, states: int, *, every: bool = False, hints: Sequence[Path] = ()) -> Path | None:
        """Returns the end with the least cost, if no more than `states` states cost less.

        Args:
            every: try every byte in strings.
            hints: try these in strings, too.
        """
        order, seen = count(), set[tuple[int, int, Path]]()
        waiting: list[tuple[int, int, Path, int, int, Path]] = [(0, next(order), (), 0, 0, ())]
        while waiting and states:
            cost, _, path, before, alike, hint = heappop(waiting)
            states -= 1
            end, moves = self._visit(path, goal, every=every)
            if end is not None:
                return path + end
            # A string with a minimum length has many states after one another that admit the same bytes.
            alike = alike + 1 if moves.state == before else 0
            if (moves.state, alike, hint) not in seen:
                seen.add((moves.state, alike, hint))
                hinted = [move for move in hints if moves.inside and self._reader.admits(move)]
                further = UNHINTED if hinted else 0
                for move in moves.paths if len(path) < MAX_PATH else ():
                    heappush(
                        waiting, (cost + further + _cost(move), next(order), path + move, moves.state, alike, hint)
                    )
                for move in hinted:
                    heappush(waiting, (cost + _cost(move), next(order), path + move, moves.state, alike, move))
        return None

    def _ahead(self, goal: Path) -> Path | None:
        """Returns the end to which the most promising bytes lead."""
        path: Path = ()
        inside = before = 0
        for _ in range(MAX_STEPS):
            end, moves = self._visit(path, goal)
            if end is not None:
                return path + end
            if not moves.paths or len(path) > MAX_PATH:
                return None
            if moves.inside:
                step = self._filling(moves.paths[0], inside)
            else:  # where the same may follow as before, what was promising led nowhere: digits may go on and on
                step = moves.paths[0] if moves.state == before else self._promising(path, moves)
            inside = inside + len(step) if moves.inside else 0
            before = moves.state
            path += step
        return None

    def _visit(self, path: Path, goal: Path, *, every: bool = False) -> tuple[Path | None, "_Moves"]:
        """Goes along a path. Returns `_Reader.end` and, without an end, the next steps."""
        for _ in range(2):
            try:
                self._reader.go(path)
                end = self._reader.end(goal)
                return end, _NONE if end is not None else self._moves(every=every)
            except _EngineError:  # where the search was before may have cost all that an engine may have
                self._renew()
        return None, _NONE

    def _promising(self, path: Path, moves: "_Moves") -> Path:
        """Returns a move that closes something, or that after which the fewest bytes are forced, as of a short name."""
        first = moves.paths[0]
        if len(moves.paths) == 1 or first[0] in self._leading:
            return first
        try:
            forced = []
            for move in moves.paths:
                self._reader.go(path + move)
                forced.append(len(self._reader.forced()))
        except _EngineError:
            self._renew()
            return first
        return moves.paths[forced.index(min(forced))]

    def _filling(self, byte: Path, inside: int) -> Path:
        """Returns a byte once, or as often as the grammar admits in a string that is already long."""
        sizes = [size for size in FILLINGS if size * 4 <= inside and self._reader.admits(byte * size)]
        return byte * max(sizes, default=1)

    def _moves(self, *, every: bool = False) -> "_Moves":
        """Returns the next steps of a search, the best first."""
        if forced := self._reader.forced():
            path = self._tokenized(forced) if self._letters is None else tuple(forced)
            return _Moves([path], hash(forced), inside=False)
        mask = self._reader.legal()
        if (mask, every) not in self._choices:  # a text has many places, at which few masks are legal
            legal = self._bytes_of(mask) if mask else []
            inside = len(legal) > _MANY
            legal = _different(legal) if inside and not every else sorted(legal, key=_rank)
            self._choices[mask, every] = _Moves([(self._byte_tokens[byte],) for byte in legal], hash(mask), inside)
        return self._choices[mask, every]

    def _bytes_of(self, mask: bytes) -> list[int]:
        """Returns the bytes whose tokens are legal."""
        bits = np.frombuffer(mask, np.uint8)[self._places // 8] >> (self._places % 8).astype(np.uint8) & 1
        return [self._bytes[at] for at in np.flatnonzero(bits).tolist()]

    def _bytewise(self, text: bytes) -> Path:
        if self._letters is not None:
            return tuple(text)
        if all(byte in self._byte_tokens for byte in text):
            return tuple(self._byte_tokens[byte] for byte in text)
        return tuple(self._tokenizer.tokenize_bytes(text))

    def _tokenized(self, text: bytes) -> Path:
        """Returns the usual tokens of a text. A tokenizer that marks the beginnings of words may have other bytes."""
        tokens = self._tokenizer.tokenize_bytes(text)
        return tuple(tokens) if self._tokenizer.decode_bytes(tokens) == text else self._bytewise(text)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Holds the next steps of a search, the best first.

    Attributes:
        state: a number that tells the state apart from others.
        inside: whether this is inside a string, where many bytes may follow.
    """

    paths: list[Path]
    state: int
    inside: bool


_NONE = _Moves([], 0, inside=False)


def _cost(move: Path) -> int:
    """Returns the number of tokens that the bytes of a move take, about."""
    return 1 + len(move) // 4


def _rank(byte: int) -> int:
    if byte in _FIRST:
        return _FIRST.index(byte)
    return byte + 256 * (byte in _LAST)


def _different(legal: list[int]) -> list[int]:
    """Returns few of many bytes: those that may end a string, and one of each kind of letters and digits."""
    kinds = [next((byte for byte in legal if byte in kind), None) for kind in _KINDS]
    marks = sorted((byte for byte in legal if byte < 128 and not any(byte in kind for kind in _KINDS)), key=_rank)
    if len(marks) > _MARKS:
        marks = [byte for byte in _IN_STRINGS if byte in marks]
    return marks + [byte for byte in kinds if byte is not None] or legal[:1]


class _EngineError(Exception):
    """The engine has reached one of its limits."""


class _Reader:
    """Moves an engine among the texts that begin with one text."""

    def __init__(self, engine: LLMatcher) -> None:
        self._engine = engine
        self._path: Path = ()
        self._unmasked = 0

    def extend(self, tokens: Path) -> None:
        """Appends tokens to the text."""
        self.go(())
        self._read(tokens)

    def go(self, path: Path) -> None:
        """Moves to the text with `path` after it."""
        shared = min(len(path), len(self._path))
        while path[:shared] != self._path[:shared]:
            shared -= 1
        self._take_back(len(self._path) - shared)
        self._read(path[shared:])
        self._path = path

    def forced(self) -> bytes:
        """Returns the bytes that must follow."""
        return self._checked(b"" if self._engine.is_stopped() else self._engine.compute_ff_bytes())

    def legal(self) -> bytes:
        """Returns the tokens that may follow, as `Position.legal` does."""
        self._unmasked = 0
        return self._checked(b"" if self._engine.is_stopped() else self._engine.compute_bitmask())

    def admits(self, path: Path) -> bool:
        """Tells whether tokens may follow."""
        return self._checked(not self._engine.is_stopped() and self._engine.validate_tokens(list(path)) == len(path))

    def end(self, goal: Path) -> Path | None:
        """Returns a short last part of the goal that completes the text here, or None."""
        if self._checked(self._engine.is_accepting()):
            return ()
        left = next((left for left in range(min(len(goal), TRIED)) if self._completes(goal[left:])), None)
        if left is None:
            return None
        while self._completes(goal[left + 1 :]):
            left += 1
        return goal[left:]

    def _completes(self, tokens: Path) -> bool:
        read = 0
        while read < len(tokens) and not self._engine.is_stopped():
            piece = list(tokens[read : read + PIECE])
            if self._unmasked + len(piece) > PIECE:
                self.legal()
            taken = self._engine.try_consume_tokens(piece)
            self._unmasked += taken
            read += taken
            if taken < len(piece):
                break
        complete = read == len(tokens) and self._engine.is_accepting()
        self._take_back(read)
        return self._checked(complete)

    def _read(self, tokens: Path) -> None:
        for begin in range(0, len(tokens), PIECE):
            piece = list(tokens[begin : begin + PIECE])
            if self._unmasked + len(piece) > PIECE:
                self.legal()
            self._unmasked += len(piece)
            if not self._engine.consume_tokens(piece):
                raise _EngineError

    def _take_back(self, count: int) -> None:
        if count and not self._engine.rollback(count):
            raise _EngineError

    def _checked(self, value: T) -> T:
        if self._engine.is_error():
            raise _EngineError
        return value
