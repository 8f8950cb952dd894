"""Writes the report of an audit: a JSON file, and a self-contained HTML page with its figures."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from privmix.foundation.files import write_atomically
from privmix.laboratory.audit.report.finding import Finding, broken
from privmix.laboratory.audit.report.roc import Roc
from privmix.laboratory.html_report import picture, render

TableRows = Sequence[Mapping[str, Any]]

_TEMPLATE = Path(__file__).with_name("audit.html.j2")
# The length of the longest bar, in units of epsilon.
_MAX_DRAWN = 60.0


@dataclass(frozen=True, eq=False)
class AttackSection:
    """One attack in the report.

    Attributes:
        title: the name of the attack.
        text: the method and its meaning, in a few sentences.
        findings: the findings about claims; they decide whether the audit fails.
        rows: an additional table; the keys of the rows are its columns.
        figures: the figures by their captions.
        known: the findings break uncertified claims that are known to be wrong, so they do not fail the audit.
    """

    title: str
    text: str
    findings: Sequence[Finding] = ()
    rows: TableRows = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
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

    def write(self, directory: Path) -> None:
        """Writes `audit.json` and `audit.html`."""
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / "audit.json", (json.dumps(self.record(), indent=2) + "\n").encode())
        write_atomically(directory / "audit.html", self.page().encode())

    def page(self) -> str:
        """Returns the HTML page, which loads no other file."""
        return render(
            _TEMPLATE,
            filters={"cell": _cell, "picture": picture},
            sections=self.sections,
            broken=self.broken,
            finding_rows=finding_rows,
            columns=_columns,
        )


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


def roc_figure(curves: Mapping[str, Roc], claims: Mapping[str, tuple[float, float]] = {}) -> Figure:
    """Draws curves on logarithmic axes, and the bound that each claim (epsilon, delta) sets for all of them."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    lowest = 1e-5
    for label, roc in curves.items():
        positive = (roc.false_positives > 0) & (roc.true_positives > 0)
        axes.plot(roc.false_positives[positive], roc.true_positives[positive], label=label)
    grid = [10 ** (exponent / 50) for exponent in range(-250, 1)]
    for label, (epsilon, delta) in claims.items():
        if math.isfinite(epsilon):
            bound = [min(1.0, math.exp(min(epsilon, 700)) * rate + delta) for rate in grid]
            axes.plot(grid, bound, linestyle=":", color="black", label=f"bound: {label}")
    axes.plot(grid, grid, color="lightgray")
    axes.set(xscale="log", yscale="log", xlim=(lowest, 1), ylim=(lowest, 1))
    axes.set(xlabel="false positives", ylabel="true positives")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def bars(findings: Sequence[Finding]) -> Figure:
    """Draws claims and bounds side by side."""
    figure = Figure(figsize=(8, 0.5 + 0.45 * len(findings)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{finding.subject}, tokens: {finding.details['tokens']}" for finding in findings]
    places = range(len(findings))
    claims = [min(finding.claim, _MAX_DRAWN) for finding in findings]
    exact = [min(finding.exact or 0.0, _MAX_DRAWN) for finding in findings]
    axes.barh(places, claims, color="lightgray", label="claimed")
    axes.barh(places, exact, height=0.5, label="exact, this pair")
    axes.barh(places, [finding.lower for finding in findings], height=0.25, label="lower bound from tokens")
    axes.set_yticks(list(places), labels)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set(xlabel="epsilon")
    axes.legend(fontsize=8)
    return figure


def _columns(rows: TableRows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
