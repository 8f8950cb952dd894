"""Finds what texts copy from the private text: their longest common spans of tokens, and planted secrets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import read_lines
from privmix.privacy.arrays import Integers


@dataclass(frozen=True)
class CopiedSpans:
    """Describes the longest span of each text that is also in one private text, in tokens.

    Attributes:
        longest, median, high: the maximum, the median and the 95 % quantile over the texts.
        spans: the span of each text.
    """

    longest: int
    median: float
    high: float
    spans: tuple[int, ...]

    @classmethod
    def of(cls, spans: Integers) -> "CopiedSpans":
        median, high = np.quantile(spans, (0.5, 0.95))
        return cls(int(spans.max()), float(median), float(high), tuple(int(span) for span in spans))


@dataclass(frozen=True)
class Secrets:
    """Counts secrets that are in a set of texts.

    Attributes:
        found, planted: of the secrets in the private text.
        others_found, others: of those that are not in the private text: what chance finds.
    """

    found: int
    planted: int
    others_found: int
    others: int


@dataclass(frozen=True)
class PlantedSecret:
    """A secret and whether the private text has it."""

    secret: str
    included: bool


def longest_spans(texts: Sequence[Sequence[int]], private: Sequence[Sequence[int]]) -> Integers:
    """Returns the length of the longest span of each text that occurs in a private text, int64 [texts]; exact.

    Length after length, it names all spans by their number among the distinct ones: a span is the name of its first
    part and its last token. Only spans that both sides have are continued.
    """
    longest = np.zeros(len(texts), dtype=np.int64)
    sides = [_Spans(texts), _Spans(private)]
    while all(len(side.starts) for side in sides):
        names = [side.names * (1 << 32) + side.next_tokens for side in sides]
        _, renamed = np.unique(np.concatenate(names), return_inverse=True)
        ours, theirs = renamed[: len(names[0])], renamed[len(names[0]) :]
        common = np.intersect1d(ours, theirs)
        for side, own in zip(sides, (ours, theirs), strict=True):
            side.keep(np.isin(own, common), own)
        longest[np.unique(sides[0].owners)] = sides[0].length
        for side in sides:
            side.drop_ended()
    return longest


class _Spans:
    """Holds the spans of one length in many texts, by the position after each."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._tokens = np.array([token for text in texts for token in text], dtype=np.int64)
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        self._ends = np.repeat(lengths.cumsum(), lengths)
        self._owner = np.repeat(np.arange(len(texts)), lengths)
        self.starts: Integers = np.arange(len(self._tokens))
        self.names: Integers = np.zeros(len(self._tokens), dtype=np.int64)
        self.length = 0

    @property
    def next_tokens(self) -> Integers:
        return np.asarray(self._tokens[self.starts + self.length])

    @property
    def owners(self) -> Integers:
        """The text of each span."""
        return np.asarray(self._owner[self.starts])

    def keep(self, chosen: NDArray[np.bool_], names: Integers) -> None:
        """Continues the chosen spans by a token and gives them these names."""
        self.starts, self.names, self.length = self.starts[chosen], names[chosen], self.length + 1

    def drop_ended(self) -> None:
        """Leaves out the spans that end where their text ends."""
        going_on = self.starts + self.length < self._ends[self.starts]
        self.starts, self.names = self.starts[going_on], self.names[going_on]


def read_canaries(path: Path) -> tuple[PlantedSecret, ...]:
    """Reads secrets: the canaries of `privmix demo-corpus` (`code`, `split`) or of an audit (`secret`, `included`).

    Raises:
        InputError: the file or a line is invalid.
    """
    rows = read_lines(path, "an object with a secret or a code", "canaries")
    return tuple(_planted(row, f"canaries {path}: line {number}") for number, row in rows)


def find_secrets(texts: Sequence[str], canaries: Sequence[PlantedSecret]) -> Secrets:
    """Counts the canaries whose secret is in a text."""
    whole = "\n".join(texts)
    found = [canary.secret in whole for canary in canaries]
    included = [canary.included for canary in canaries]
    both = sum(map(bool.__and__, found, included))
    return Secrets(both, sum(included), sum(found) - both, len(canaries) - sum(included))


def _planted(row: Mapping[str, Any], place: str) -> PlantedSecret:
    secret = row.get("secret") or row.get("code")
    if not secret:
        raise InputError(f"{place}: must be an object with a secret or a code")
    return PlantedSecret(str(secret), bool(row.get("included", row.get("split", "train") == "train")))
