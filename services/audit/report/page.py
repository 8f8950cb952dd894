"""The report of an audit: one JSON file, and one self-contained HTML page with its figures inside."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from services.audit.report.finding import Finding, broken
from services.audit.report.roc import Roc
from services.files import write_atomically
from services.html_report import picture, render

Rows = Sequence[Mapping[str, Any]]

_TEMPLATE = Path(__file__).with_name("audit.html.j2")


@dataclass(frozen=True, eq=False)
class Section:
    """One attack in the report.

    Attributes:
        title: its name.
        text: what was done, and what it means, in a few sentences.
        findings: what it says of claims; they decide whether the audit fails.
        rows: a table, where it has one besides; the keys of the first row are its columns.
        figures: by their captions.
        known: its findings break claims that are not certified, as is known of them: they do not fail the audit.
    """

    title: str
    text: str
    findings: Sequence[Finding] = ()
    rows: Rows = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    known: bool = False

    def record(self) -> dict[str, Any]:
        """The section for programs."""
        return {
            "title": self.title,
            "text": self.text,
            "findings": [finding.record() for finding in self.findings],
            "rows": [{name: _plain(value) for name, value in row.items()} for row in self.rows],
        }


@dataclass(frozen=True)
class Report:
    """All that was found."""

    sections: Sequence[Section]

    @property
    def broken(self) -> list[Finding]:
        """The findings that fail the audit."""
        return [finding for section in self.sections if not section.known for finding in broken(section.findings)]

    def record(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "sections": [section.record() for section in self.sections],
            "broken": [finding.sentence for finding in self.broken],
        }

    def write(self, directory: Path) -> None:
        """`audit.json` and `audit.html`."""
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / "audit.json", (json.dumps(self.record(), indent=2) + "\n").encode())
        write_atomically(directory / "audit.html", self.page().encode())

    def page(self) -> str:
        """The page, which loads nothing from anywhere."""
        return render(
            _TEMPLATE,
            filters={"cell": _cell, "picture": picture},
            sections=self.sections,
            broken=self.broken,
            finding_rows=finding_rows,
            columns=_columns,
        )


def finding_rows(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """A row of text for each finding: what is claimed, and what is shown."""
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
    """A number for people."""
    if value is None:
        return "-"
    return f"{value:.3f}" if math.isfinite(value) else "unbounded"


def roc_figure(curves: Mapping[str, Roc], claims: Mapping[str, tuple[float, float]] = {}) -> Figure:
    """Curves on logarithmic axes; ``claims`` are (epsilon, delta), whose bound no curve may pass."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    lowest = 1e-5
    for label, roc in curves.items():
        seen = (roc.false_positives > 0) & (roc.true_positives > 0)
        axes.plot(roc.false_positives[seen], roc.true_positives[seen], label=label)
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
    """What is claimed and what is shown, side by side."""
    figure = Figure(figsize=(8, 0.5 + 0.45 * len(findings)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{each.subject}, tokens: {each.details['tokens']}" for each in findings]
    places = range(len(findings))
    capped = [min(each.claim, 60.0) for each in findings]
    axes.barh(places, capped, color="lightgray", label="claimed")
    axes.barh(places, [min(each.exact or 0.0, 60.0) for each in findings], height=0.5, label="exact, this pair")
    axes.barh(places, [each.lower for each in findings], height=0.25, label="lower bound from tokens")
    axes.set_yticks(list(places), labels)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set(xlabel="epsilon")
    axes.legend(fontsize=8)
    return figure


def _columns(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
