"""Implements `privmix audit`, which attacks the output and exits with 1 if a claim is broken."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from privmix.laboratory.audit.sizes import AdjacentSize, PlantedSize, SecretKind
from privmix_cluster.console import Steps, console, display
from privmix_cluster.options import JsonOption, TextFieldOption
from privmix_cluster.parameters import ACCEPTED, bad, options, settings_from

if TYPE_CHECKING:
    from rich.table import Table

    from privmix.laboratory.audit.black_box import RepeatedRequest
    from privmix.laboratory.audit.canaries import Canary
    from privmix.laboratory.audit.page import AttackSection, AuditReport
    from privmix.laboratory.audit.sections import Subject

_API_KEY = "PRIVMIX_API_KEY"

audit = typer.Typer(
    name="audit", help="Attack the output of protocols, and compare the result with their claims.", no_args_is_help=True
)

_LIKELIHOOD_EPSILONS, _LIKELIHOOD_TOKENS, _RELEASES = (2.0,), (1, 16), 200_000
_PUBLISHED_EPSILONS, _PUBLISHED_TOKENS = (8.0,), (64, 1024)
_EXTRACTION_EPSILONS, _CANDIDATES, _ATTEMPTS, _EXTRACTION_DRAWS = (2.0, 8.0, 64.0), 32, 10, 16
_ONE_RUN_EPSILONS, _ONE_RUN_PARTS, _QUERIES, _GUESSES = (8.0,), 32, 4, 0.5
_PARTS, _TOKENS, _TOP_K, _DELTA, _CONFIDENCE = 4, 1024, 64, 1e-5, 0.95
_GROUND, _ADJACENT = PlantedSize(), AdjacentSize()

Name = Annotated[str | None, typer.Option("--protocol", help="The protocol. Default: every certified one.")]
Parts = Annotated[int, typer.Option(min=1, help="N, the number of parts.")]
Epsilons = Annotated[list[float] | None, typer.Option("--epsilon", help="A budget to plan for; may be repeated.")]
Counts = Annotated[list[int] | None, typer.Option("--tokens", min=1, help="Tokens of a claim; may be repeated.")]
Tokens = Annotated[int, typer.Option(min=1, help="The number of tokens that the budgets must last for.")]
Delta = Annotated[float, typer.Option(help="The delta of the claims.")]
Confidence = Annotated[float, typer.Option(min=0.5, max=1, help="The confidence of the lower bounds.")]
Releases = Annotated[int, typer.Option(min=100, help="Tokens released in each world, over all trials.")]
Directory = Annotated[Path, typer.Option("--directory", help="The directory for planted text and trained models.")]
Users = Annotated[int, typer.Option(min=1, help="Ordinary people of the demo corpus.")]
Planted = Annotated[int, typer.Option(min=2, help="People with a secret, each included by a fair coin.")]
Repetitions = Annotated[int, typer.Option(min=1, help="How often the secret of an included person is in the corpus.")]
Secrets = Annotated[
    SecretKind, typer.Option(help="Random digits, or texts that the public model samples at a high temperature.")
]
Candidates = Annotated[int, typer.Option(min=2, help="The number of candidate secrets in the ranking.")]
Attempts = Annotated[int, typer.Option(min=1, help="The number of completions for each secret.")]
TopK = Annotated[int, typer.Option(min=1, help="The number of most likely tokens from which the attacker samples.")]
Draws = Annotated[int, typer.Option(min=1, help="The number of releases to average for a noisy or random protocol.")]
Queries = Annotated[int, typer.Option(min=1, help="The number of queries about each planted person.")]
Guesses = Annotated[float, typer.Option(min=0.01, max=1, help="The fraction of the coins to guess.")]

DIRECTORY = Path("run/audit")


@audit.command(context_settings=ACCEPTED)
def likelihood(
    context: typer.Context,
    protocol: Name = None,
    parts: Parts = _PARTS,
    tokens: Counts = None,
    epsilon: Epsilons = None,
    delta: Delta = _DELTA,
    releases: Releases = _RELEASES,
    confidence: Confidence = _CONFIDENCE,
    url_with: Annotated[str | None, typer.Option(help="A running service.")] = None,
    url_without: Annotated[str | None, typer.Option(help="The same with one part's model replaced.")] = None,
    prompt: Annotated[str, typer.Option(help="The prompt for both services.")] = "Caller: This is",
    temperature: Annotated[float, typer.Option(help="The temperature of both services' answers.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Run the likelihood-ratio test in the worst known case of each protocol, with its real draws and sampling.

    Any parameter of the protocol is an option: --q 0.5 --projection mix. With --url-with and --url-without, the test
    requests `releases` tokens from each of two running services, with top_k 2; every token is charged.
    """
    from privmix.laboratory.audit import black_box, sections
    from privmix.laboratory.audit.distributions import NoPairError

    steps = Steps()
    if url_with and url_without:
        steps(f"Asking both services for {releases} tokens each: every one of them is charged")
        question = black_box.RepeatedRequest(prompt, temperature=temperature)
        section = _section_over_http((url_with, url_without), question, releases, confidence)
    elif url_with or url_without:
        raise bad("url_without" if url_with else "url_with", "goes with the other: the test compares two services")
    else:
        subjects = _planned_subjects(
            protocol, options(context.args), parts, epsilon or _LIKELIHOOD_EPSILONS, tokens or _LIKELIHOOD_TOKENS, delta
        )
        try:
            section = sections.likelihood_section(subjects, delta, releases, confidence, steps)
        except NoPairError as error:
            raise bad("protocol", str(error)) from error
        mechanism = sections.mechanism_section(subjects, releases, steps)
        return _finish([section, mechanism], as_json)
    return _finish([section], as_json)


@audit.command()
def published(
    tokens: Counts = None,
    epsilon: Epsilons = None,
    delta: Delta = _DELTA,
    as_json: JsonOption = False,
) -> None:
    """Compute the cost of PMixED as published in the worst known case, beside the certified mollifier.

    The arithmetic is exact. The published claim is known to be wrong in some cases, so this does not fail the audit.
    """
    from privmix.laboratory.audit import sections

    try:
        section = sections.published_section(
            epsilon or _PUBLISHED_EPSILONS, tokens or _PUBLISHED_TOKENS, delta, Steps()
        )
    except ValueError as error:
        raise bad("epsilon", str(error)) from error
    _finish([section], as_json)


@audit.command()
def base(
    ensemble: Annotated[Path, typer.Argument(help="An ensemble of `privmix train`.")],
    ledger: Annotated[str, typer.Option(help="The ledger of its service: a SQLite file, or a URL.")],
    trained: Annotated[
        list[Path] | None,
        typer.Option(help="A directory of `privmix train-base`, whose weights must not pass as public; repeat."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that the ledger charges the private base under an ensemble, once, and that no base passes as public.

    It reads the weights, and composes the events with dp-accounting. The exit status is 1 if it finds a fault.
    """
    from privmix.laboratory.audit import private_base

    found = private_base.faults(ensemble, ledger, trained or ())
    if as_json:
        print(json.dumps({"faults": found}, indent=2))
    else:
        print("\n".join(f"fault: {fault}" for fault in found) or "no fault found")
    raise typer.Exit(bool(found))


@audit.command(name="extraction", context_settings=ACCEPTED)
def extraction_(
    context: typer.Context,
    directory: Directory = DIRECTORY,
    users: Users = _GROUND.users,
    planted: Planted = _GROUND.planted,
    repetitions: Repetitions = _GROUND.repetitions,
    parts: Parts = _GROUND.parts,
    secrets: Secrets = _GROUND.secrets,
    protocol: Annotated[
        str | None, typer.Option(help="The protocol. Default: every one that `privmix evaluate` compares.")
    ] = None,
    epsilon: Epsilons = None,
    tokens: Tokens = _TOKENS,
    delta: Delta = _DELTA,
    candidates: Candidates = _CANDIDATES,
    attempts: Attempts = _ATTEMPTS,
    top_k: TopK = _TOP_K,
    draws: Draws = _EXTRACTION_DRAWS,
    url: Annotated[str | None, typer.Option(help="Also query a running service of the trained ensemble.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plant secrets in the demo corpus and measure how often each protocol outputs them, and how high they rank.

    Trains an ensemble, and one model of the whole corpus, into DIRECTORY and keeps them. With --url, also queries a
    service of DIRECTORY/ensemble over HTTP; every token is charged.
    """
    from privmix.laboratory.audit import extraction, sections, testbed

    steps, epsilons = Steps(), epsilon or _EXTRACTION_EPSILONS
    if protocol is None and not context.args:
        subjects = _compared_subjects(parts, epsilons, tokens, delta)
    else:
        subjects = _planned_subjects(protocol, options(context.args), parts, epsilons, (tokens,), delta)
    known = _train_planted(directory, PlantedSize(users, planted, repetitions, parts, secrets), subjects, steps)
    steps(f"Asking the models for {len(known)} secrets")
    trained = testbed.evaluate_testbed(directory, known, candidates, top_k)
    served = None
    if url is not None:
        included = trained.canaries
        charged = sum(canary.length for canary in included) * attempts
        steps(f"Asking {url} for {charged} tokens: every one of them is charged")
        served = extraction.over_http(url, included, attempts, top_k, os.environ.get(_API_KEY))
    _finish([sections.extraction_section(trained, subjects, attempts, draws, steps, served)], as_json)


@audit.command(name="one-run", context_settings=ACCEPTED)
def one_run(
    context: typer.Context,
    protocol: Name = None,
    parts: Parts = _ONE_RUN_PARTS,
    queries: Queries = _QUERIES,
    epsilon: Epsilons = None,
    delta: Delta = _DELTA,
    confidence: Confidence = _CONFIDENCE,
    guesses: Guesses = _GUESSES,
    directory: Annotated[
        Path | None, typer.Option(help="The directory of `privmix audit extraction`: also guess its planted users.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Bound epsilon from below with one ensemble, by guessing many fair coins from the released tokens."""
    from privmix.laboratory.audit import sections, testbed
    from privmix.laboratory.audit.sections import Subject

    steps, given, epsilons = Steps(), options(context.args), epsilon or _ONE_RUN_EPSILONS
    subjects = _planned_subjects(protocol, given, parts, epsilons, (parts * queries,), delta)
    trained = None
    on_testbed: Sequence[Subject] = ()
    if directory is not None:
        steps("Asking the models for the planted secrets")
        trained = testbed.load_testbed(directory)
        count = queries * sum(canary.length for canary in trained.outputs)
        on_testbed = _planned_subjects(protocol, given, trained.parts, epsilons, (count,), delta)
    section = sections.one_run_section(subjects, on_testbed, trained, queries, delta, confidence, guesses, steps)
    _finish([section], as_json)


@audit.command()
def released(
    texts: Annotated[Path, typer.Argument(help="A job of `privmix generate`, or JSON Lines.")],
    directory: Annotated[
        Path,
        typer.Option("--directory", help="The directory of `privmix audit extraction`, whose ensemble wrote them."),
    ] = DIRECTORY,
    text_field: TextFieldOption = "text",
    confidence: Confidence = _CONFIDENCE,
    guesses: Guesses = _GUESSES,
    as_json: JsonOption = False,
) -> None:
    """Bound epsilon from below by released text alone: train a model on it, and guess who was planted.

    Trains into DIRECTORY. The claim is the one of the texts' card; a JSON Lines file claims nothing.
    """
    from privmix.laboratory.audit import released_text, sections, testbed

    steps, read = Steps(), released_text.read_released(texts, text_field)
    canaries, corpus = testbed.planted(directory)
    steps(f"Training on {len(read.texts)} released texts (a finished model is kept)")
    trained = released_text.train_on(read, directory, display())
    steps(f"Asking the models for {len(canaries)} secrets")
    scores, of_the_corpus = released_text.score((trained, corpus), canaries)
    section = sections.released_section(read, canaries, scores, of_the_corpus, confidence, guesses)
    _finish([section], as_json)


@audit.command()
def plant(
    directory: Directory = DIRECTORY / "adjacent",
    parts: Parts = _ADJACENT.parts,
    repetitions: Annotated[int, typer.Option(min=8, help="How often the user says the word.")] = _ADJACENT.repetitions,
    as_json: JsonOption = False,
) -> None:
    """Train two ensembles with and without one user's text, the worst case for an audit over HTTP.

    Serve DIRECTORY/with and DIRECTORY/without with the same configuration and separate ledgers, and compare them with
    `privmix audit likelihood --url-with URL --url-without URL --prompt PROMPT --releases 4000`.
    """
    from privmix.laboratory.audit import adjacent

    steps = Steps()
    steps(f"Training two ensembles of {parts} parts (finished adapters are kept)")
    found = adjacent.plant(directory, AdjacentSize(parts, repetitions), display())
    if as_json:
        print(json.dumps({"directory": str(directory), **asdict(found)}, indent=2))
        return
    rows = [{"model": "public", "with the user": found.public, "without": found.public}]
    for part, (present, absent) in enumerate(zip(*found.shares.values(), strict=True)):
        rows.append({"model": f"part {part}", "with the user": present, "without": absent})
    question, shown = found.question, console()
    title = f"Chance of {question.planted!r} rather than {question.usual!r} after {question.prompt!r}"
    shown.print(_titled_table(title, rows))
    shown.print(
        f"Serve {escape(str(directory / adjacent.WITH))} and {adjacent.WITHOUT}, and ask both, at 8,000 tokens:"
    )
    shown.print(
        f"  privmix audit likelihood --url-with URL --url-without URL --prompt {shlex.quote(question.prompt)} "
        "--releases 4000",
        soft_wrap=True,
        markup=False,
    )


@audit.command(name="all")
def all_(
    directory: Directory = DIRECTORY,
    delta: Delta = _DELTA,
    confidence: Confidence = _CONFIDENCE,
    releases: Releases = _RELEASES,
    as_json: JsonOption = False,
) -> None:
    """Run every attack with its defaults."""
    from privmix.laboratory.audit import sections, testbed

    steps = Steps()
    certified = _planned_subjects(None, {}, _PARTS, _LIKELIHOOD_EPSILONS, _LIKELIHOOD_TOKENS, delta)
    every = [
        sections.likelihood_section(certified, delta, releases, confidence, steps),
        sections.mechanism_section(certified, releases, steps),
        sections.published_section(_PUBLISHED_EPSILONS, _PUBLISHED_TOKENS, delta, steps),
    ]
    compared = _compared_subjects(_GROUND.parts, _EXTRACTION_EPSILONS, _TOKENS, delta)
    known = _train_planted(directory, _GROUND, compared, steps)
    trained = testbed.evaluate_testbed(directory, known, _CANDIDATES, _TOP_K)
    every.append(sections.extraction_section(trained, compared, _ATTEMPTS, _EXTRACTION_DRAWS, steps))
    coins = _planned_subjects(None, {}, _ONE_RUN_PARTS, _ONE_RUN_EPSILONS, (_ONE_RUN_PARTS * _QUERIES,), delta)
    tokens = _QUERIES * sum(canary.length for canary in known)
    planted = _planned_subjects(None, {}, _GROUND.parts, _ONE_RUN_EPSILONS, (tokens,), delta)
    every.append(sections.one_run_section(coins, planted, trained, _QUERIES, delta, confidence, _GUESSES, steps))
    _finish(every, as_json)


def _finish(every: "Sequence[AttackSection]", as_json: bool) -> None:
    """Shows the report; exits with 1 if a claim is broken."""
    from privmix.laboratory.audit.page import AuditReport

    report = AuditReport(every)
    if as_json:
        print(json.dumps(report.record(), indent=2))
    else:
        _show(report)
    if report.broken:
        raise typer.Exit(1)


def _train_planted(
    directory: Path, size: PlantedSize, subjects: "Sequence[Subject]", steps: Steps
) -> "Sequence[Canary]":
    from privmix.laboratory.audit import testbed

    halves = any(subject.protocol.halves for subject in subjects)
    what = "parts and their halves" if halves else "parts"
    steps(f"Planting {size.planted} secrets and training {size.parts} {what} (finished ones are kept)")
    return testbed.train_testbed(directory, size, halves=halves, display=display())


def _section_over_http(
    urls: tuple[str, str], question: "RepeatedRequest", count: int, confidence: float
) -> "AttackSection":
    import httpx

    from privmix.laboratory.audit import black_box
    from privmix.laboratory.audit.page import AttackSection

    api_key = os.environ.get(_API_KEY)
    try:
        present, absent = (black_box.collect_answers(url, question, count, api_key) for url in urls)
    except httpx.HTTPError as error:
        raise bad("url_with", str(error)) from error
    return AttackSection(
        title="Likelihood-ratio test over HTTP",
        text="Two running services were asked the same; the claim is that of one token of the first.",
        findings=[black_box.audit(present, absent, confidence)],
    )


def _planned_subjects(
    protocol: str | None,
    given: Mapping[str, object],
    parts: int,
    epsilons: Sequence[float],
    tokens: Sequence[int],
    delta: float,
) -> "list[Subject]":
    """Returns the protocols to attack, each planned for every budget."""
    from privmix.laboratory.audit.variants import audited

    chosen: Sequence[tuple[str, Mapping[str, object]]] = [(protocol, {})] if protocol else list(audited(parts))
    if given and protocol is None:
        raise bad("protocol", "name the protocol of the given parameters")
    return [
        _subject(name, {**given, **parameters}, parts, epsilon, count, delta)
        for count in tokens
        for epsilon in epsilons
        for name, parameters in chosen
    ]


def _compared_subjects(parts: int, epsilons: Sequence[float], tokens: int, delta: float) -> "list[Subject]":
    """Returns every protocol that `privmix evaluate` compares, with the same names and settings."""
    from privmix.laboratory.audit.sections import Subject
    from privmix.laboratory.evaluation import methods
    from privmix.laboratory.evaluation.comparisons import label
    from privmix.training.options import TokenBudget

    budgets = [TokenBudget(epsilon=epsilon, delta=delta, tokens=tokens) for epsilon in epsilons]
    return [
        Subject(label(settings), settings.plan(parts), tokens, budget.epsilon, settings)
        for budget in budgets
        for settings in methods.private(budget, parts, halves=True)
    ]


def _subject(
    name: str, given: Mapping[str, object], parts: int, epsilon: float, tokens: int, delta: float
) -> "Subject":
    from privmix.laboratory.audit.sections import Subject
    from privmix.privacy.protocols import PROTOCOLS

    without_budget = name in PROTOCOLS and PROTOCOLS[name].model_fields["epsilon"].default is None
    budget = {} if without_budget else {"epsilon": epsilon}
    settings = settings_from(name, {**given, **budget, "tokens": tokens, "delta": delta})
    try:
        protocol = settings.plan(parts)
    except ValueError as error:
        raise bad("epsilon", str(error)) from error
    chosen = ", ".join(f"{key} {value}" for key, value in given.items())
    return Subject(f"{name}, {chosen}" if chosen else name, protocol, tokens, epsilon, settings)


def _show(report: "AuditReport") -> None:
    from privmix.laboratory.audit.page import finding_rows

    shown = console()
    for section in report.sections:
        # A section's own table repeats its findings.
        shown.print(_titled_table(section.title, section.rows or finding_rows(section.findings)))
        shown.print(escape(section.text), style="dim")
    for finding in report.broken:
        shown.print(f"[red]broken:[/red] {escape(finding.sentence)}", soft_wrap=True)


def _titled_table(title: str, rows: Sequence[Mapping[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    return table


def _cell(value: object) -> str:
    from privmix.laboratory.audit.finding import finite

    if isinstance(value, float):
        return f"{value:.4g}" if finite(value) is not None else "unbounded"
    return "-" if value is None else escape(str(value))
