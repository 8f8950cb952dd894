"""What an attack finds, beside what is claimed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from services.privacy.events import Status
from services.privacy.protocol import Protocol

Verdict = Literal["holds", "doubtful", "broken", "no claim"]

CERTAIN = 1 - 1e-6
"""The confidence at which a claim is called broken: a sound mechanism is accused once in a million audits."""


@dataclass(frozen=True)
class Finding:
    """One claim under one attack.

    Attributes:
        attack: how it was attacked.
        subject: the mechanism, by its name and what sets it apart.
        status: how far its promise reaches.
        claims: epsilon by each accountant; infinite ones claim nothing.
        delta: that of the claims and of the bounds.
        lower: epsilon is at least this, at `confidence`.
        confidence: of `lower`.
        certain: epsilon is at least this, at `CERTAIN`.
        exact: epsilon of the very pair attacked, from its exact law, without statistics; None where it is not known.
        refuted: what was seen that the mechanism as described makes all but impossible, as sentences.
        details: what else describes the attack.
    """

    attack: str
    subject: str
    status: Status
    claims: Mapping[str, float]
    delta: float
    lower: float
    confidence: float
    certain: float
    exact: float | None = None
    refuted: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_description(
        cls,
        attack: str,
        protocol: Protocol,
        subject: str | None,
        confidence: float,
        refuted: tuple[str, ...],
        details: Mapping[str, Any],
    ) -> Self:
        """Returns a finding about a mechanism as described, which bounds no epsilon.

        Args:
            subject: None: the protocol's name.
        """
        return cls(
            attack=attack,
            subject=subject or protocol.name,
            status=protocol.guarantee.status,
            claims={},
            delta=0.0,
            lower=0.0,
            confidence=confidence,
            certain=0.0,
            refuted=refuted,
            details={"adjacency": protocol.guarantee.adjacency, **details},
        )

    @property
    def claim(self) -> float:
        """The smallest epsilon claimed."""
        return min(self.claims.values(), default=math.inf)

    @property
    def proven(self) -> float:
        """A lower bound on epsilon that is beyond doubt."""
        return max(self.certain, self.exact or 0.0)

    @property
    def tightness(self) -> float:
        """The share of the claim that the attack shows to be needed, by the better of its two bounds."""
        return max(self.lower, self.exact or 0.0) / self.claim

    @property
    def broken_claims(self) -> tuple[str, ...]:
        """The accountants whose epsilon is certainly exceeded."""
        return tuple(name for name, epsilon in self.claims.items() if self.proven > epsilon)

    @property
    def verdict(self) -> Verdict:
        """``doubtful`` is a bound above the claim at `confidence` alone: by chance that happens, too."""
        if self.refuted or self.broken_claims:
            return "broken"
        if self.claims and math.isinf(self.claim):
            return "no claim"
        return "doubtful" if self.lower > self.claim else "holds"

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.refuted and not self.broken_claims:
            return f"{self.subject}: the {self.attack} refutes what is described: {'; '.join(self.refuted)}"
        if not self.claims:
            return f"{self.subject}: the {self.attack} are as described"
        against = ", ".join(f"{name} {epsilon:.3f}" for name, epsilon in self.claims.items())
        match self.verdict:
            case "broken":
                names = " and ".join(self.broken_claims)
                return (
                    f"{self.subject}: the {self.attack} proves an epsilon of at least {self.proven:.3f} at delta "
                    f"{self.delta:g}, above what is claimed by {names} ({against}; {self.status})"
                )
            case "doubtful":
                return (
                    f"{self.subject}: the {self.attack} puts epsilon above {self.lower:.3f} at confidence "
                    f"{self.confidence:g}, against {against}: repeat it with more trials"
                )
            case _:
                return f"{self.subject}: the {self.attack} puts epsilon above {self.lower:.3f}, against {against}"

    def record(self) -> dict[str, Any]:
        """The finding for programs; what is infinite is null."""
        return {
            **asdict(self),
            "claims": {name: finite(epsilon) for name, epsilon in self.claims.items()},
            "tightness": finite(self.tightness),
            "verdict": self.verdict,
            "broken_claims": list(self.broken_claims),
        }


def broken(findings: Iterable[Finding]) -> list[Finding]:
    """Those whose claim does not hold."""
    return [finding for finding in findings if finding.verdict == "broken"]


def finite(value: float | None) -> float | None:
    """The value, or None where it is not finite: JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
