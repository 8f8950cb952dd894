"""Finds how a text of a grammar can end soon, so that an answer ends well before its tokens are used up.

The search works on bytes, because a few bytes may follow where thousands of tokens may. It is a heuristic: a shorter
end may exist. But what it returns is true, because the grammar's engine has read each end and accepted it.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from llguidance import LLMatcher

from privmix.structure.vocabulary import BYTES, Vocabulary

PIECE = 64
"""The maximum number of tokens between two masks, because the engine renews its fuel at masks only."""
MAX_TOKENS = 4096
"""The maximum number of tokens of an end."""
NEAR_STATES, FAR_STATES = 48, 3000
"""The states that a search visits in the order of their costs, at first and at last. Most ends need the first ones."""
AHEAD_STATES = 6000
"""The states that it visits straight ahead."""
TRIED = 64
"""How many bytes at the beginning of the known end a search tries to leave out."""

_FIRST = b"}]),:;>\"'0123456789"
"""Bytes that are tried first: those that close something, or lead on to what is required, and short values."""
_LAST = b"-.[{("
"""Bytes that are tried last, because something must follow them."""
_IN_STRINGS = b'"-@.\n:0aA'
"""What is tried in a string in which any byte may follow: what may end it or what formats need."""
_MANY = 24
"""If more bytes than this may follow, it is inside a string."""
_HINT = re.compile(r"[*+}]\)?([\w :.,;<>/=-]{2,64})(?:\[(\w))?")
"""A literal after a repetition, and a character of the class after it."""


class EndFinder:
    """Knows an end of a text while the text grows: tokens that complete it.

    An end depends on the grammar and on the texts of all calls. The engine is its own, so that a search changes nothing
    for the matcher.

    Args:
        compile_: returns a new engine of the grammar at the beginning of a text, whose vocabulary is `BYTES`.
        vocabulary: that of the texts and of their ends.
        grammar: its literals after repetitions may lead out of free text, where no byte is nearer to the end.
    """

    def __init__(self, compile_: Callable[[], LLMatcher], vocabulary: Vocabulary, grammar: str) -> None:
        self._compile = compile_
        self._vocabulary = vocabulary
        self._reader = _Reader(compile_())
        self._moves: dict[tuple[bytes, bool], list[bytes]] = {}
        text = json.loads(grammar)["grammars"][0]["lark_grammar"].removesuffix("/").replace(r"\/", "/")
        found = dict.fromkeys(_HINT.findall(text))
        self._hints = sorted(("".join(hint).encode() for hint in found), key=len)[:24]
        self._text: tuple[int, ...] | None = None
        self._bytes = b""
        self._known: bytes | None = b""
        self._end: tuple[int, ...] = ()

    def after(self, text: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns an end of a text that extends the text of the previous call. None if none was found, now or before.

        Args:
            text: tokens that the grammar admits.
        """
        if self._known is not None and text != self._text:
            added = self._vocabulary.tokenizer.decode_bytes(list(text[len(self._text or ()) :]))
            known, is_first, self._text = self._known, self._text is None, text
            self._bytes += added
            try:
                self._read(added)
                follows = known.startswith(added) and not is_first
                self._known = known[len(added) :] if follows else self._found(known)
            except _EngineError:
                self._known = None
            self._end = self._tokens(self._known or b"")
            if len(self._end) > MAX_TOKENS:
                self._known = None
        return None if self._known is None else self._end

    def _read(self, added: bytes) -> None:
        try:
            self._reader.extend(added)
        except _EngineError:
            self._renew()

    def _renew(self) -> None:
        """Replaces an engine that has reached a limit, as the states of a long text and of searches accumulate."""
        self._reader = _Reader(self._compile())
        self._reader.extend(self._bytes)

    def _found(self, known: bytes) -> bytes | None:
        """Searches an end. Wherever the search comes, it tries the known end, which the new tokens seldom change."""
        searches: Sequence[Callable[[], bytes | None]] = (
            lambda: self._near(known, NEAR_STATES),
            lambda: self._ahead(known),
            lambda: self._near(known, FAR_STATES, every=True),
        )
        return next((end for search in searches if (end := search()) is not None), None)

    def _visit(self, path: bytes) -> "_Place | None":
        """Returns what follows a path; None if that exceeds a limit of a new engine, too."""
        for _ in range(2):
            try:
                return self._reader.go(path)
            except _EngineError:  # where the search was before may have cost all that an engine may have
                self._renew()
        return None

    def _near(self, known: bytes, states: int, *, every: bool = False) -> bytes | None:
        """Returns the end with the least cost, if no more than `states` states cost less.

        Args:
            every: try every byte in strings.
        """
        order, seen = count(), set[tuple[bytes, int, bytes]]()
        waiting = [(0, next(order), b"", b"", 0, b"")]
        for _ in range(states):
            if not waiting:
                return None
            cost, _, path, before, alike, hint = heappop(waiting)
            place = self._visit(path)
            if place is None:
                continue
            if (end := place.end(known)) is not None:
                return path + end
            # A string with a minimum length has many states after one another that admit the same bytes.
            alike = alike + 1 if place.state == before else 0
            if (place.state, alike, hint) not in seen:
                seen.add((place.state, alike, hint))
                hints = [(text, text) for text in self._hints if place.inside and place.admits(text)]
                for move, hint_ in (*hints, *((move, hint) for move in self._next(place, every=every))):
                    further = cost + 1 + len(move) // 4
                    heappush(waiting, (further, next(order), path + move, place.state, alike, hint_))
        return None

    def _ahead(self, known: bytes) -> bytes | None:
        """Returns the end to which the most promising bytes lead."""
        path = before = b""
        for _ in range(AHEAD_STATES):
            place = self._visit(path)
            if place is None or (end := place.end(known)) is not None:
                return None if place is None else path + (end or b"")
            if not (moves := self._next(place)):
                return None
            # Where the same may follow as before, what was promising led nowhere: digits may go on and on.
            if len(moves) > 1 and not place.inside and place.state != before and moves[0][0] not in _FIRST:
                moves = sorted(moves, key=lambda move: self._forced(path + move))
            before = place.state
            path += moves[0]
        return None

    def _forced(self, path: bytes) -> int:
        """Returns how many bytes are forced after a path, such as the rest of a name."""
        place = self._visit(path)
        return MAX_TOKENS if place is None else len(place.forced)

    def _next(self, place: "_Place", *, every: bool = False) -> Sequence[bytes]:
        """Returns the next steps of a search, the best first."""
        if place.forced:
            return [place.forced]
        if (place.mask, every) not in self._moves:  # a text has many places, at which few masks are legal
            legal = sorted(place.legal, key=lambda byte: (byte in _LAST, _FIRST.find(byte) % 256, byte))
            if place.inside and not every:
                legal = [byte for byte in _IN_STRINGS if byte in legal] or legal[:1]
            self._moves[place.mask, every] = [bytes((byte,)) for byte in legal]
        return self._moves[place.mask, every]

    def _tokens(self, text: bytes) -> tuple[int, ...]:
        """Returns the usual tokens of a text. A tokenizer that marks the beginnings of words may have other bytes."""
        tokens = self._vocabulary.tokenizer.tokenize_bytes(text)
        if self._vocabulary.tokenizer.decode_bytes(tokens) != text:
            single = self._vocabulary.byte_tokens
            tokens = [single[byte] for byte in text] if single.keys() >= set(text) else tokens
        return tuple(tokens)


class _EngineError(Exception):
    """The engine has reached one of its limits."""


@dataclass(frozen=True)
class _Place:
    """What follows a path of a search.

    Attributes:
        forced: the bytes that must follow.
        mask: the bytes that may follow, as bits; empty if some must.
    """

    engine: LLMatcher
    forced: bytes
    mask: bytes

    @property
    def state(self) -> bytes:
        """Tells places apart."""
        return self.forced or self.mask

    @property
    def legal(self) -> list[int]:
        bits = int.from_bytes(self.mask[:32], "little")
        return [byte for byte in range(256) if bits >> byte & 1]

    @property
    def inside(self) -> bool:
        """Whether this is inside a string, where many bytes may follow."""
        return int.from_bytes(self.mask[:32], "little").bit_count() > _MANY

    def admits(self, text: bytes) -> bool:
        return bool(self.engine.validate_tokens(list(text)) == len(text))

    def end(self, known: bytes) -> bytes | None:
        """Returns the shortest last part of the known end that completes the text here, or None."""
        if self.engine.is_accepting():
            return b""
        parts = (known[left:] for left in reversed(range(min(len(known), TRIED))))
        return next((part for part in parts if self._completes(part)), None)

    def _completes(self, part: bytes) -> bool:
        return bool(self.engine.validate_tokens([*part, BYTES.tokenizer.eos_token]) == len(part) + 1)


class _Reader:
    """Moves an engine among the texts that begin with one text."""

    def __init__(self, engine: LLMatcher) -> None:
        self._engine = engine
        self._path = b""

    def extend(self, text: bytes) -> None:
        """Appends bytes to the text."""
        self.go(b"")
        self._read(text)

    def go(self, path: bytes) -> _Place:
        """Moves to the text with `path` after it."""
        shared = min(len(path), len(self._path))
        while path[:shared] != self._path[:shared]:
            shared -= 1
        if shared < len(self._path) and not self._engine.rollback(len(self._path) - shared):
            raise _EngineError
        self._path = path
        self._read(path[shared:])
        stopped = self._engine.is_stopped()
        forced = b"" if stopped else self._engine.compute_ff_bytes()
        mask = b"" if stopped or forced else self._engine.compute_bitmask()
        if self._engine.is_error():
            raise _EngineError
        return _Place(self._engine, forced, mask)

    def _read(self, text: bytes) -> None:
        for begin in range(0, len(text), PIECE):
            if not self._engine.consume_tokens(list(text[begin : begin + PIECE])):
                raise _EngineError
            self._engine.compute_bitmask()
