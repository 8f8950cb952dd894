"""Does the work of `privmix audit`."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.markup import escape
from rich.table import Table

from privmix.laboratory.audit.attacks import black_box
from privmix.laboratory.audit.report.finding import finite
from privmix.laboratory.audit.report.page import AttackSection, AuditReport, finding_rows
from privmix.laboratory.audit.report.sections import Subject
from privmix.laboratory.audit.variants import audited
from privmix.laboratory.audit.worlds import testbed
from privmix.laboratory.audit.worlds.canaries import Canary
from privmix.laboratory.audit.worlds.sizes import PlantedSize
from privmix.laboratory.evaluation import methods
from privmix.laboratory.evaluation.comparisons import label
from privmix.privacy.protocols import PROTOCOLS
from privmix.training.options import TokenBudget
from privmix_cluster.console import console, display
from privmix_cluster.parameters import bad, settings_from
from privmix_cluster.steps import Steps

API_KEY = "PRIVMIX_API_KEY"


def finish(every: Sequence[AttackSection], as_json: bool) -> None:
    """Shows the report; exits with 1 if a claim is broken."""
    report = AuditReport(every)
    if as_json:
        print(json.dumps(report.record(), indent=2))
    else:
        _show(report)
    if report.broken:
        raise typer.Exit(1)


def train_planted(
    directory: Path, size: PlantedSize, subjects: Sequence[Subject], steps: Steps, as_json: bool
) -> Sequence[Canary]:
    halves = any(subject.protocol.halves for subject in subjects)
    what = "parts and their halves" if halves else "parts"
    steps(f"Planting {size.planted} secrets and training {size.parts} {what} (finished ones are kept)")
    return testbed.train_testbed(directory, size, halves=halves, display=display(as_json))


def section_over_http(
    urls: tuple[str, str], question: black_box.RepeatedRequest, count: int, confidence: float
) -> AttackSection:
    api_key = os.environ.get(API_KEY)
    try:
        present, absent = (black_box.collect_answers(url, question, count, api_key) for url in urls)
    except httpx.HTTPError as error:
        raise bad("url_with", str(error)) from error
    return AttackSection(
        title="Likelihood-ratio test over HTTP",
        text="Two running services were asked the same; the claim is that of one token of the first.",
        findings=[black_box.audit(present, absent, confidence)],
    )


def planned_subjects(
    protocol: str | None,
    given: Mapping[str, object],
    parts: int,
    epsilons: Sequence[float],
    tokens: Sequence[int],
    delta: float,
) -> list[Subject]:
    """Returns the protocols to attack, each planned for every budget."""
    chosen: Sequence[tuple[str, Mapping[str, object]]] = [(protocol, {})] if protocol else list(audited(parts))
    if given and protocol is None:
        raise bad("protocol", "name the protocol of the given parameters")
    return [
        _subject(name, {**given, **parameters}, parts, epsilon, count, delta)
        for count in tokens
        for epsilon in epsilons
        for name, parameters in chosen
    ]


def compared_subjects(parts: int, epsilons: Sequence[float], tokens: int, delta: float) -> list[Subject]:
    """Returns every protocol that `privmix evaluate` compares, with the same names and settings."""
    budgets = [TokenBudget(epsilon=epsilon, delta=delta, tokens=tokens) for epsilon in epsilons]
    return [
        Subject(label(settings), settings.plan(parts), tokens, budget.epsilon, settings)
        for budget in budgets
        for settings in methods.private(budget, parts, halves=True)
    ]


def _subject(name: str, given: Mapping[str, object], parts: int, epsilon: float, tokens: int, delta: float) -> Subject:
    without_budget = name in PROTOCOLS and PROTOCOLS[name].model_fields["epsilon"].default is None
    budget = {} if without_budget else {"epsilon": epsilon}
    settings = settings_from(name, {**given, **budget, "tokens": tokens, "delta": delta})
    try:
        protocol = settings.plan(parts)
    except ValueError as error:
        raise bad("epsilon", str(error)) from error
    chosen = ", ".join(f"{key} {value}" for key, value in given.items())
    return Subject(f"{name}, {chosen}" if chosen else name, protocol, tokens, epsilon, settings)


def _show(report: AuditReport) -> None:
    shown = console()
    for section in report.sections:
        # A section's own table repeats its findings.
        shown.print(titled_table(section.title, section.rows or finding_rows(section.findings)))
        shown.print(escape(section.text), style="dim")
    for finding in report.broken:
        shown.print(f"[red]broken:[/red] {escape(finding.sentence)}", soft_wrap=True)


def titled_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    return table


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if finite(value) is not None else "unbounded"
    return "-" if value is None else escape(str(value))
