"""Keeps what a shard was told of the live sequences, so that a step tells what has changed, in arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privmix.engine.engine import PUBLIC, ZERO, Request
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocol import Protocol
from privmix.shards.reducer import Reduction

NOBODY = -1
"""Fills the rows of a draw that no model has."""
MOST = 4096
"""How many sequences and callers a shard remembers. Those of a coordinator that died are forgotten, as the oldest."""


class LostSessionError(RuntimeError):
    """The shard does not remember what the caller has told it. The caller tells everything again."""


@dataclass(frozen=True, slots=True)
class StepKey:
    """Names a call that makes a shard hold something for the next one.

    Attributes:
        caller: the coordinator.
        step: the number of the caller's attempt at a step. A repeated step has a new number.
        batch: the number of the call within the attempt.
    """

    caller: str
    step: int
    batch: int


@dataclass(frozen=True, slots=True)
class Terms:
    """Holds what a caller tells once: the protocol, and the adapters of the models of this group, by number."""

    protocol: Protocol
    models: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Asked:
    """Asks for one token of each sequence of a batch, and tells what has changed since the shard was told last.

    The first S sequences are private, with a public row and n part rows each. The others have a public row.

    Attributes:
        sequences: their ids.
        known: int32 [requests], how many tokens of each context the shard was told before; 0 for a new sequence.
        lengths: int32 [requests], how many tokens each context has.
        news: int32, the other tokens, those of one sequence after those of another.
        changed: the cache salt and the options of each sequence, by place, if it is new or its options changed.
        drawn: int16 [S, n], the drawn models of this group, and then `NOBODY`.
        allowances: int64 [S, n], the most that each token may charge to each part; None without accounts.
        terms: None if they were told before.
    """

    key: StepKey
    sequences: tuple[str, ...]
    known: NDArray[np.int32]
    lengths: NDArray[np.int32]
    news: NDArray[np.int32]
    changed: Mapping[int, tuple[str | None, SamplingOptions]]
    drawn: NDArray[np.int16]
    allowances: NDArray[np.int64] | None = None
    terms: Terms | None = None


@dataclass(slots=True)
class _Session:
    """Holds a sequence. Its tokens grow at their end: the engine sees that they continue what it has read."""

    tokens: list[int]
    cache_salt: str | None
    options: SamplingOptions


class Sessions:
    """Remembers the sequences of all callers, and the latest step and the terms of each."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._callers: dict[str, tuple[int, Terms]] = {}

    def told(self, asked: Asked) -> tuple[list[Request], Reduction]:
        """Returns what the engine computes for a call, and how its rows are reduced.

        The number of rows is the same for each private sequence: `ZERO` fills those that no model has. A mechanism
        that draws the number of parts (`Protocol.rows` is None) has one of these where none is drawn: parts with keys
        and values of their own read every token of a private sequence.

        Raises:
            LostSessionError: the caller assumes that more is known here than is, or has told a later step.
        """
        terms = self._terms_of(asked)
        sessions = self._sessions_of(asked)
        fewest = 1 if terms.protocol.rows is None else asked.drawn.shape[1]
        adapters = [_names(row, terms, fewest) for row in asked.drawn.tolist()]
        adapters += [()] * (len(sessions) - len(adapters))
        requests = [
            Request(sequence, session.tokens, (PUBLIC, *own), session.cache_salt)
            for sequence, session, own in zip(asked.sequences, sessions, adapters, strict=True)
        ]
        options = tuple(session.options for session in sessions)
        return requests, Reduction(terms.protocol, options, asked.drawn != NOBODY, asked.allowances)

    def append(self, sequences: Sequence[str | None], tokens: NDArray[np.int64]) -> None:
        """Continues contexts by picked tokens. Ignores unknown sequences."""
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            if sequence in self._sessions:
                self._sessions[sequence].tokens.append(token)

    def forget(self, sequence: str) -> None:
        """Forgets a sequence. Ignores unknown ones."""
        self._sessions.pop(sequence, None)

    def _terms_of(self, asked: Asked) -> Terms:
        latest, before = self._callers.get(asked.key.caller, (0, None))
        terms = before if asked.terms is None else asked.terms
        if terms is None or asked.key.step < latest:
            raise LostSessionError
        self._callers.pop(asked.key.caller, None)
        self._callers[asked.key.caller] = asked.key.step, terms
        _forget_oldest(self._callers)
        return terms

    def _sessions_of(self, asked: Asked) -> list[_Session]:
        """Returns the sequences as they are now. Remembers nothing of a call of which one is lost."""
        known = asked.known.tolist()
        sessions = [
            self._sessions.get(sequence) if count else _Session([], None, SamplingOptions())
            for sequence, count in zip(asked.sequences, known, strict=True)
        ]
        found = [
            session for session, count in zip(sessions, known, strict=True) if session and len(session.tokens) == count
        ]
        if len(found) < len(sessions):
            raise LostSessionError
        news, first = asked.news.tolist(), 0
        for session, count in zip(found, (asked.lengths - asked.known).tolist(), strict=True):
            session.tokens += news[first : first + count]
            first += count
        for place, (cache_salt, options) in asked.changed.items():
            found[place].cache_salt, found[place].options = cache_salt, options
        for sequence, session in zip(asked.sequences, found, strict=True):
            self._sessions.pop(sequence, None)  # the latest comes last
            self._sessions[sequence] = session
        _forget_oldest(self._sessions)
        return found


def _forget_oldest(remembered: dict[str, Any]) -> None:
    while len(remembered) > MOST:
        del remembered[next(iter(remembered))]


def _names(row: list[int], terms: Terms, fewest: int) -> tuple[str, ...]:
    names = [terms.models[model] for model in row if model != NOBODY]
    return (*names, *[ZERO] * (fewest - len(names)))
