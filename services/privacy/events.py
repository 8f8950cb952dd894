"""Privacy events: what a released token costs, as plain immutable data from which any accountant can work."""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import ArrayLike, NDArray

from services.privacy.worlds import Pair

Orders = ArrayLike
Divergences = NDArray[np.float64]

PLD_INTERVAL = 1e-4
"""dp-accounting's own grid of privacy losses."""

_KINDS: dict[str, type["Event"]] = {}


Status = Literal["certified", "as published", "operational", "data-dependent", "none"]
"""How far a promise reaches, from the strongest to the weakest."""

Adjacency = Literal["user", "record", "part, as published"]
"""Which two corpora an observer must not tell apart.

``user``: one user's text in the corpus or not. A user's text goes to one part, so that part's model is replaced by any
other; the number of parts and all shapes stay. ``record``: one document in the corpus or not. ``part, as published``:
one part in the ensemble or not, which published analyses assume and which does not protect a user.
"""

PROTECTED: Mapping[Adjacency, str] = {
    "user": "any one user's text, in the private corpus or not",
    "record": "any one record of the private corpus, present or absent",
    "part, as published": "any one part of the private corpus, present or absent",
}
SEPARATE_PARTS = (
    "each part's model depends on that part alone",
    "a user's part depends on that user alone",
    "which parts answered stays secret",
)


@dataclass(frozen=True)
class Guarantee:
    """The parts of a statement of what is promised.

    Attributes:
        status: how far the promise reaches; ``none`` promises nothing, and only its source is said.
        source: where the analysis is published.
        adjacency: which two corpora an observer cannot tell apart.
        assumes: what must hold for the promise, one clause each.
        notion: what is measured by epsilon and delta.
        seen: what an observer may see, where that has no limit; None stands for all released tokens.
    """

    status: Status
    source: str
    adjacency: Adjacency = "user"
    assumes: tuple[str, ...] = SEPARATE_PARTS
    notion: str = "differential privacy"
    seen: str | None = None

    @property
    def protects(self) -> str:
        """Whose text is protected; nobody's without a promise."""
        return "nobody" if self.status == "none" else PROTECTED[self.adjacency]

    def sentence(self, epsilon: str, delta: float, tokens: int | None) -> str:
        """One sentence for people; ``epsilon`` is already rounded up (`accounting.shown`)."""
        if self.status == "none":
            return f"No privacy guarantee: {self.source}."
        seen = self.seen or ("all released tokens" if tokens is None else f"up to {tokens} released tokens")
        return (
            f"Against whoever sees {seen}, ({epsilon}, {delta:g})-{self.notion} for {self.protects}: "
            f"{self.status} ({self.source}), provided that {'; '.join(self.assumes)}."
        )


@dataclass(frozen=True)
class Event(ABC):
    """The cost of one released token. Subclasses are frozen dataclasses of plain numbers and strings.

    Attributes:
        kind: names the class in JSON; never renamed, ledgers are read for ever.
        measured: whether each token also comes with losses that depend on the private text (`Release.losses`).
        once: whether the cost is that of any number of tokens, because all come from one private release.
    """

    kind: ClassVar[str]
    measured: ClassVar[bool] = False
    once: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not hasattr(cls, "kind"):  # an abstract class
            return
        known = _KINDS.setdefault(cls.kind, cls)
        if known.__qualname__ != cls.__qualname__:
            raise TypeError(f"event kind {cls.kind!r} is taken by {known.__qualname__}")

    @abstractmethod
    def rdp(self, orders: Orders) -> Divergences:
        """Rényi divergence bound per token at each real order > 1, in both directions, under `adjacency`.

        Data-independent; infinite where no such bound is known.
        """

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution | None:
        """Privacy loss distribution of one token under `adjacency`, or None where no dominating pair is known.

        Losses are rounded up to multiples of ``interval``.
        """
        return None

    def part_level_rdp(self, orders: Orders) -> Divergences | None:
        """Rényi divergence per token for one part present or absent, which earlier versions promised.

        `privmix plan` shows it for those who migrate. None where earlier versions had no such number.
        """
        return None

    def worst_pairs(self) -> Iterable[Pair]:
        """Pairs of ensembles among which an audit looks for the one that is told apart best.

        Built from the claim alone; the models may go further than the mechanism lets them, so that a mechanism that
        does not hold them back is found out. Empty where no worst case is known.
        """
        return ()

    @property
    @abstractmethod
    def guarantee(self) -> Guarantee:
        """What the event's numbers promise."""

    @property
    def adjacency(self) -> Adjacency:
        """Which two corpora the event's numbers are about."""
        return self.guarantee.adjacency

    def to_json(self) -> str:
        """Canonical text of the event: equal events give equal text."""
        return json.dumps({"kind": self.kind, **dataclasses.asdict(self)}, sort_keys=True, separators=(",", ":"))


def real_orders(orders: Orders) -> NDArray[np.float64]:
    """The orders as a float64 vector.

    Raises:
        ValueError: an order is not a finite number above 1.
    """
    vector = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    valid = np.isfinite(vector) & (vector > 1)
    if not valid.all():
        raise ValueError(f"Rényi orders must be finite and above 1, got {vector[~valid][0]}")
    return vector


def check_parts(parts: int) -> None:
    """Raises ValueError, naming ``parts``, where it is no number of parts."""
    if not isinstance(parts, int) or parts < 1:
        raise ValueError(f"parts must be an integer of at least 1, got {parts}")


def from_json(text: str) -> Event:
    """The event that `Event.to_json` wrote.

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
