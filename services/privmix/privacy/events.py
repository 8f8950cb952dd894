"""Defines privacy events: immutable data that describe the cost of a released token for any accountant."""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Orders = ArrayLike
Divergences = NDArray[np.float64]

PLD_INTERVAL = 1e-4
"""The grid interval of privacy losses, dp-accounting's default."""

_KINDS: dict[str, type[Event]] = {}


GuaranteeStatus = Literal["certified", "as published", "operational", "data-dependent", "none"]
"""The status of a guarantee, from the strongest to the weakest."""

Adjacency = Literal["user", "record", "part, as published"]
"""Which pairs of corpora an observer must not distinguish.

``user``: one user's text is in the corpus or not. A user's text is in one part, so that part's model is replaced by any
other model, while the number of parts and all shapes stay the same. ``record``: one document is in the corpus or not.
``part, as published``: one part is in the ensemble or not. Published analyses assume this; it does not protect a user.
"""

PROTECTED: Mapping[Adjacency, str] = {
    "user": "any one user's text, in the private corpus or not",
    "record": "any one record of the private corpus, present or absent",
    "part, as published": "any one part of the private corpus, present or absent",
}
SEPARATE_PARTS = (
    "the public model was trained without the private text",
    "each part's model depends on that part alone",
    "a user's part depends on that user alone",
    "which parts answered stays secret",
)


@dataclass(frozen=True)
class Guarantee:
    """Holds the elements of a privacy guarantee.

    Attributes:
        status: how strong the guarantee is; ``none`` guarantees nothing.
        source: where the analysis is published; for ``none``, the reason.
        adjacency: which pairs of corpora the guarantee covers.
        assumes: the assumptions, one clause each.
        notion: the privacy notion that epsilon and delta measure.
        seen: what an observer may see, if it has no limit; None means all released tokens.
    """

    status: GuaranteeStatus
    source: str
    adjacency: Adjacency = "user"
    assumes: tuple[str, ...] = SEPARATE_PARTS
    notion: str = "differential privacy"
    seen: str | None = None

    @property
    def protects(self) -> str:
        """Whose text is protected; nobody's without a guarantee."""
        return "nobody" if self.status == "none" else PROTECTED[self.adjacency]

    def provided(self, assumption: str) -> Self:
        """Returns this guarantee with one more assumption; one that assumes nothing stays."""
        return replace(self, assumes=(*self.assumes, assumption)) if self.assumes else self

    def sentence(self, epsilon: str, delta: float, tokens: int | None) -> str:
        """Returns the guarantee in one sentence.

        ``epsilon`` must not be rounded down: use `accounting.stated` for a budget and `accounting.shown` for a cost.
        """
        if self.status == "none":
            return f"No privacy guarantee: {self.source}."
        seen = self.seen or ("all released tokens" if tokens is None else f"up to {tokens} released tokens")
        return (
            f"Against an observer of {seen}, ({epsilon}, {delta})-{self.notion} for {self.protects}: "
            f"{self.status} ({self.source}){self._assuming('provided that')}."
        )

    def stopped_by_losses(self, epsilon: str, delta: float) -> str:
        """Returns the sentence for a service that stops when the losses measured on the private text reach a limit.

        It states no epsilon. When the service stops depends on the text, clients see it, and the analysis of the losses
        assumes that nobody does.
        """
        return (
            f"No epsilon is stated: clients see when the losses that are measured on the private text reach the limit "
            f"({epsilon}, {delta}), because the service then stops. The analysis of these losses is {self.status} "
            f"({self.source}), of {self.notion} for {self.protects}{self._assuming('and assumes that')}."
        )

    def _assuming(self, words: str) -> str:
        return f", {words} {'; '.join(self.assumes)}" if self.assumes else ""


@dataclass(frozen=True)
class Accountant:
    """Describes how a ledger that exists composes tokens, which was fixed when it was made.

    Attributes:
        order: the Rényi order of its filter.
        tokens: the number of tokens that its plan counted; None where Rényi divergences allow as many, or where the
            operator chose the event.
        event: the event of each of them.
    """

    order: float
    tokens: int | None = None
    event: Event | None = None


@dataclass(frozen=True)
class Event(ABC):
    """Describes the cost of one released token. Subclasses are frozen dataclasses of numbers and strings.

    Attributes:
        kind: the name of the class in JSON. It must never change, because old ledgers must stay readable.
        measured: whether each token also has losses that depend on the private text (`Release.losses`).
        once: whether the event is charged only once for any number of tokens: they come from one release, or accounts
            limit the cost of all of them together.
        accounts: whether each part has an account, to which each token charges its own cost (`Release.charges`).
    """

    kind: ClassVar[str]
    measured: ClassVar[bool] = False
    once: ClassVar[bool] = False
    accounts: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not hasattr(cls, "kind"):  # an abstract class
            return
        known = _KINDS.setdefault(cls.kind, cls)
        if known.__qualname__ != cls.__qualname__:
            raise TypeError(f"event kind {cls.kind!r} is taken by {known.__qualname__}")

    @abstractmethod
    def rdp(self, orders: Orders) -> Divergences:
        """Returns a bound of a token's Rényi divergence at each real order > 1, in both directions, under `adjacency`.

        The bound does not depend on data. It is infinite if no such bound is known.
        """

    @property
    def token_epsilon(self) -> float:
        """A bound of the absolute log-likelihood ratio of a single token, where `rdp` bounds all tokens together."""
        return math.inf

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution | None:
        """Returns the privacy loss distribution of one token under `adjacency`; None if no dominating pair is known.

        Losses are rounded up to multiples of ``interval``.
        """
        return None

    @property
    @abstractmethod
    def guarantee(self) -> Guarantee:
        """The guarantee that the event's numbers support."""

    @property
    def adjacency(self) -> Adjacency:
        """The adjacency of the event's numbers."""
        return self.guarantee.adjacency

    def to_json(self) -> str:
        """Returns the event as canonical JSON: equal events yield equal text."""
        return json.dumps({"kind": self.kind, **dataclasses.asdict(self)}, sort_keys=True, separators=(",", ":"))

    def as_dict(self) -> dict[str, Any]:
        """Returns what `to_json` writes, in the types that JSON has."""
        fields: dict[str, Any] = json.loads(self.to_json())
        return fields


def real_orders(orders: Orders) -> NDArray[np.float64]:
    """Returns the orders as a float64 vector.

    Raises:
        ValueError: an order is not a finite number above 1.
    """
    vector = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    valid = np.isfinite(vector) & (vector > 1)
    if not valid.all():
        raise ValueError(f"Rényi orders must be finite and above 1, got {vector[~valid][0]}")
    return vector


def check_parts(parts: int) -> None:
    """Raises ValueError, which names ``parts``, unless it is a positive integer."""
    if not isinstance(parts, int) or parts < 1:
        raise ValueError(f"parts must be an integer of at least 1, got {parts}")


@lru_cache(maxsize=1024)
def from_json(text: str) -> Event:
    """Reads an event that `Event.to_json` wrote.

    Raises:
        ValueError: the text is not JSON, its kind is unknown, or its fields are not those of the kind.
    """
    try:
        fields: dict[str, Any] = dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"an event must be a JSON object, got {text[:80]!r}") from error
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"unknown kind of event {kind!r}; known: {', '.join(sorted(_KINDS))}")
    try:
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise ValueError(f"event of kind {kind!r} does not have the fields {sorted(fields)}") from error
