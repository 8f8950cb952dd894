"""Holds the report of an audit, as JSON data and as tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from privmix.laboratory.audit.finding import Finding, broken

TableRows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class AttackSection:
    """One attack in the report.

    Attributes:
        title: the name of the attack.
        text: the method and its meaning, in a few sentences.
        findings: the findings about claims; they decide whether the audit fails.
        rows: an additional table; the keys of the rows are its columns.
        known: the findings break uncertified claims that are known to be wrong, so they do not fail the audit.
    """

    title: str
    text: str
    findings: Sequence[Finding] = ()
    rows: TableRows = ()
    known: bool = False

    def record(self) -> dict[str, Any]:
        """Returns the section as JSON data."""
        return {
            "title": self.title,
            "text": self.text,
            "findings": [finding.record() for finding in self.findings],
            "rows": [{name: _plain(value) for name, value in row.items()} for row in self.rows],
        }


@dataclass(frozen=True)
class AuditReport:
    sections: Sequence[AttackSection]

    @property
    def broken(self) -> list[Finding]:
        """The findings that fail the audit."""
        return [finding for section in self.sections if not section.known for finding in broken(section.findings)]

    def record(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        return {
            "sections": [section.record() for section in self.sections],
            "broken": [finding.sentence for finding in self.broken],
        }


def finding_rows(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """Returns a table row for each finding: the claim and the bounds."""
    return [_finding_row(finding) for finding in findings]


def _finding_row(finding: Finding) -> dict[str, str]:
    details = finding.details
    guessed = (
        {"notion": details["notion"], "right guesses": f"{details['correct']} of {details['guesses']}"}
        if "correct" in details
        else {}
    )
    exact = {} if finding.exact is None else {"exact": number(finding.exact)}
    return {
        "mechanism": finding.subject,
        "adjacency": str(details.get("adjacency", "")),
        "tokens": str(details.get("tokens", "")),
        **{name: number(epsilon) for name, epsilon in finding.claims.items()},
        **guessed,
        "lower bound": number(finding.lower),
        **exact,
        "of the claim": "-" if math.isinf(finding.claim) else f"{finding.tightness:.1%}",
        "guarantee": finding.status,
        "verdict": finding.verdict,
    }


def number(value: float | None) -> str:
    """Formats a number for a table."""
    if value is None:
        return "-"
    return f"{value:.3f}" if math.isfinite(value) else "unbounded"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
