"""`privmix audit`: attacks on what is released, against what is claimed; exit 1 and say which claim broke."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.parameters import ACCEPTED, bad, options, settings_from
from cluster.steps import Steps
from services.audit import likelihood, published
from services.audit.pairs import NoPairError
from services.audit.report import Report, Section, bars, finding_rows, roc_figure
from services.privacy.protocol import Protocol

audit = typer.Typer(
    name="audit", help="Attack what is released, and compare with what is claimed.", no_args_is_help=True
)

CERTIFIED: Sequence[tuple[str, Mapping[str, object]]] = (
    ("pmixed", {}),
    ("pmixed", {"projection": "mix"}),
    ("exponential", {}),
    ("gnmax", {}),
    ("subsample-aggregate", {}),
    ("adapmixed", {}),
)
"""What is audited where no protocol is named."""

PUBLISHED: Sequence[tuple[int, float]] = ((2, 1.0), (8, 1.0), (80, 1.0), (80, 0.1), (80, 0.03))
"""Parts and q of the comparison; the last are the paper's."""

Parts = Annotated[int, typer.Option(min=1, help="N, how many parts the ensemble has.")]
Delta = Annotated[float, typer.Option(help="The delta of the claim.")]
Confidence = Annotated[float, typer.Option(min=0.5, max=1, help="Of the lower bounds that are shown.")]
Output = Annotated[Path | None, typer.Option(help="A directory for audit.json and audit.html.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True)
class Subject:
    """A protocol as it is set for so many tokens."""

    name: str
    protocol: Protocol
    tokens: int


@audit.command(name="likelihood", context_settings=ACCEPTED)
def likelihood_(
    context: typer.Context,
    protocol: Annotated[str | None, typer.Option(help="The protocol; every certified one unless given.")] = None,
    parts: Parts = 4,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Tokens seen in a trial; may be repeated.")] = None,
    epsilon: Annotated[float, typer.Option(help="The claim: a budget for so many tokens.")] = 2.0,
    delta: Delta = 1e-5,
    releases: Annotated[int, typer.Option(min=100, help="Tokens released in each world, over all trials.")] = 200_000,
    confidence: Confidence = 0.95,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """The likelihood-ratio test in the worst case that is known of each protocol, with its real draws and sampling.

    Any parameter of the protocol is an option: --q 0.5 --projection mix.
    """
    given: dict[str, object] = {**options(context.args), "epsilon": epsilon, "delta": delta}
    chosen: Sequence[tuple[str, Mapping[str, object]]] = [(protocol, {})] if protocol else CERTIFIED
    subjects = [
        _subject(name, parts, each, {**given, **parameters})
        for each in tokens or (1, 16)
        for name, parameters in chosen
    ]
    finish(Report([likelihood_section(subjects, delta, releases, confidence, Steps())]), output, as_json)


@audit.command(name="published")
def published_(
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of the claim; may be repeated.")] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="The claim's epsilon; may be repeated.")] = None,
    delta: Delta = 1e-5,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """What tokens of PMixED as published cost in the worst case that is known, beside the certified mollifier.

    Exact arithmetic. It is known that the published claim can be exceeded: that does not fail the audit.
    """
    finish(Report([published_section(epsilon or (8.0,), tokens or (64, 1024), delta, Steps())]), output, as_json)


def likelihood_section(
    subjects: Sequence[Subject], delta: float, releases: int, confidence: float, steps: Steps
) -> Section:
    """Both adjacencies of every subject."""
    audited = []
    for subject in subjects:
        for adjacency in get_args(likelihood.Adjacency):
            steps(f"{subject.name}, {subject.tokens} tokens, {adjacency}")
            try:
                audited.append(
                    likelihood.audit(
                        subject.protocol,
                        tokens=subject.tokens,
                        delta=delta,
                        adjacency=adjacency,
                        releases=releases,
                        confidence=confidence,
                        subject=subject.name,
                    )
                )
            except NoPairError as error:
                raise bad("protocol", str(error)) from error
    findings = [each.finding for each in audited]
    one_part = [each for each in audited if each.finding.details["adjacency"] == "present or absent"]
    return Section(
        title="Likelihood-ratio test",
        text=(
            "The auditor knows both ensembles and everything but the randomness, and sees the tokens of some queries. "
            "Lower bounds come from tokens that were really drawn and sampled (Clopper-Pearson, threshold chosen on "
            "other trials); the exact epsilon is that of the very pair attacked, and says how tight the accounting is."
        ),
        findings=findings,
        figures={
            "Claims, and what is shown of them": bars(findings),
            "One part present or absent": roc_figure(
                {f"{each.finding.subject}, {each.finding.details['tokens']} tokens": each.roc for each in one_part}
            ),
        },
    )


def published_section(epsilons: Sequence[float], tokens: Sequence[int], delta: float, steps: Steps) -> Section:
    """One comparison for each setting."""
    findings, rows = [], []
    for parts, q in PUBLISHED:
        for epsilon in epsilons:
            for count in tokens:
                steps(f"{parts} parts, q {q:g}, epsilon {epsilon:g}, {count} tokens")
                try:
                    theirs, ours = published.compare(parts, q, epsilon, delta, count)
                except ValueError as error:
                    raise bad("epsilon", str(error)) from error
                findings += [theirs, ours]
                rows.append(
                    {
                        "parts": parts,
                        "q": q,
                        "tokens": count,
                        "claimed epsilon": epsilon,
                        "published: epsilon of the pair": theirs.exact,
                        "published: D of a token, claimed": theirs.details["token_divergence_claimed"],
                        "published: D of a token, of the pair": theirs.details["token_divergence"],
                        "certified: PLD": ours.claims["PLD"],
                        "certified: epsilon of the pair": ours.exact,
                    }
                )
    return Section(
        title="PMixED as published",
        text=(
            "Algorithm 1 of Flemings et al. 2024 bounds each part's Rényi divergence to the public model at one order; "
            "the proof of its Theorem 5.1 uses the bound at every order. On a token that is rare under the public "
            "model two parts may both keep to the bound and still be far apart. For each setting the table has what "
            "the tokens of such a pair cost, computed exactly, beside what is claimed: the divergence of one token at "
            "the published order, and epsilon for all of them. Where the pair costs less than is claimed, nothing is "
            "shown. The certified mollifier bounds the likelihood ratio itself."
        ),
        findings=findings,
        rows=rows,
        known=True,
    )


def finish(report: Report, output: Path | None, as_json: bool) -> None:
    """Write and show the report; exit 1 where a claim broke."""
    if output is not None:
        report.write(output)
    if as_json:
        print(json.dumps(report.record(), indent=2))
    else:
        _show(report, output)
    if report.broken:
        raise typer.Exit(1)


def _subject(name: str, parts: int, tokens: int, given: Mapping[str, object]) -> Subject:
    settings = settings_from(name, {**given, "tokens": tokens})
    try:
        protocol = settings.plan(parts)
    except ValueError as error:
        raise bad("epsilon", str(error)) from error
    chosen = ", ".join(f"{key} {value}" for key, value in given.items() if key not in ("epsilon", "delta"))
    return Subject(f"{name}, {chosen}" if chosen else name, protocol, tokens)


def _show(report: Report, output: Path | None) -> None:
    console = Console()
    for section in report.sections:
        for rows in (finding_rows(section.findings) if not section.rows else [], section.rows):
            if rows:
                console.print(_table(section.title, rows))
        console.print(escape(section.text), style="dim")
    for finding in report.broken:
        console.print(f"[red]broken:[/red] {escape(finding.sentence)}", soft_wrap=True)
    if output is not None:
        console.print(f"written: {escape(str(output / 'audit.html'))}", soft_wrap=True)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
