"""Defines the finding of an attack: a lower bound beside the claim, and the verdict."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from privmix.privacy.events import GuaranteeStatus

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
        adjacency: what differs between the compared worlds.
        claim: the claimed epsilon; infinite if nothing is claimed.
        delta: the delta of the claim and of the bounds.
        lower: a lower bound on epsilon at `confidence`.
        certain: a lower bound on epsilon at `CERTAIN`.
        details: further facts about the attack.
    """

    attack: str
    subject: str
    status: GuaranteeStatus
    adjacency: str
    claim: float
    delta: float
    lower: float
    confidence: float
    certain: float
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The verdict. ``doubtful``: the bound at `confidence` exceeds the claim, which chance alone can explain."""
        if math.isinf(self.claim):
            return "no claim"
        if self.certain > self.claim:
            return "broken"
        return "doubtful" if self.lower > self.claim else "holds"

    def record(self) -> dict[str, Any]:
        """Returns the finding as JSON data, with null for an infinite claim."""
        claim = None if math.isinf(self.claim) else self.claim
        return {**asdict(self), "claim": claim, "verdict": self.verdict}

    def row(self) -> dict[str, Any]:
        """Returns the finding's row in a table, with the details that are numbers or text."""
        return {
            "attack": self.attack,
            "mechanism": self.subject,
            "adjacency": self.adjacency,
            **self.details,
            "claimed epsilon": self.claim,
            "lower bound": self.lower,
            "certain lower bound": self.certain,
            "guarantee": self.status,
            "verdict": self.verdict,
        }
