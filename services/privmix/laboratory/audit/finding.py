"""Defines the finding of an attack: a lower bound beside the claim, and the verdict."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from privmix.privacy import accounting
from privmix.privacy.events import GuaranteeStatus
from privmix.privacy.protocol import Protocol

Verdict = Literal["holds", "doubtful", "broken", "no claim"]

CERTAIN = 1 - 1e-6
"""The confidence of the verdict "broken": a sound mechanism gets it once in a million audits."""


@dataclass(frozen=True)
class Finding:
    """The result of one attack on one claim.

    Attributes:
        attack: the name of the attack.
        subject: the mechanism, by its name and its distinguishing parameters.
        status: the status of its guarantee.
        claims: the claimed epsilon by each accountant; an infinite one claims nothing.
        delta: the delta of the claims and of the bounds.
        lower: a lower bound on epsilon at `confidence`.
        confidence: the confidence of `lower`.
        certain: a lower bound on epsilon at `CERTAIN`.
        exact: the epsilon of the attacked pair, from its exact distributions; None if unknown.
        refuted: observations that contradict the mechanism's description, as sentences.
        details: further facts about the attack.
    """

    attack: str
    subject: str
    status: GuaranteeStatus
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
        """Returns a finding about a mechanism's description. It does not bound epsilon.

        Args:
            subject: the mechanism's name; None for the protocol's name.
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
        """The smallest claimed epsilon."""
        return min(self.claims.values(), default=math.inf)

    @property
    def proven(self) -> float:
        """The lower bound on epsilon that decides whether the claim is broken."""
        return max(self.certain, self.exact or 0.0)

    @property
    def tightness(self) -> float:
        """The larger of the two lower bounds as a fraction of the claim."""
        return max(self.lower, self.exact or 0.0) / self.claim

    @property
    def broken_claims(self) -> tuple[str, ...]:
        """The accountants whose epsilon is below `proven`."""
        return tuple(name for name, epsilon in self.claims.items() if self.proven > epsilon)

    @property
    def verdict(self) -> Verdict:
        """The verdict. ``doubtful``: the bound at `confidence` exceeds the claim, which chance alone can explain."""
        if self.refuted or self.broken_claims:
            return "broken"
        if self.claims and math.isinf(self.claim):
            return "no claim"
        return "doubtful" if self.lower > self.claim else "holds"

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.refuted and not self.broken_claims:
            return f"{self.subject}: the description is refuted by the {self.attack}: {'; '.join(self.refuted)}"
        if not self.claims:
            return f"{self.subject}: the description is consistent with the {self.attack}"
        against = ", ".join(f"{name} {accounting.shown(epsilon)}" for name, epsilon in self.claims.items())
        match self.verdict:
            case "broken":
                names = " and ".join(self.broken_claims)
                return (
                    f"{self.subject}: the {self.attack} proves an epsilon of at least {self.proven:.3f} at delta "
                    f"{self.delta:g}, above the claim of {names} ({against}; {self.status})"
                )
            case "doubtful":
                return (
                    f"{self.subject}: the {self.attack} puts epsilon above {self.lower:.3f} at confidence "
                    f"{self.confidence:g}; the claim is {against}; repeat it with more trials"
                )
            case _:
                return f"{self.subject}: the {self.attack} puts epsilon above {self.lower:.3f}; the claim is {against}"

    def record(self) -> dict[str, Any]:
        """Returns the finding as JSON data, with null for infinite values."""
        return {
            **asdict(self),
            "claims": {name: finite(epsilon) for name, epsilon in self.claims.items()},
            "tightness": finite(self.tightness),
            "verdict": self.verdict,
            "broken_claims": list(self.broken_claims),
        }


def broken(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings with a broken claim."""
    return [finding for finding in findings if finding.verdict == "broken"]


def finite(value: float | None) -> float | None:
    """Returns the value, or None if it is not finite, because JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
