"""Implements `privmix audit`, which attacks what an operator has, and exits with 1 if a claim is broken."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privmix.laboratory.audit.sizes import AdjacentSize, PlantedSize
from privmix.laboratory.evaluation.options import ComparisonOptions
from privmix_cluster.console import Steps, display
from privmix_cluster.method_options import BUDGET, MethodOptions
from privmix_cluster.option_groups import FieldsOf, Given, grouped
from privmix_cluster.options import JsonOption
from privmix_cluster.parameters import bad
from privmix_cluster.tables import show_table

if TYPE_CHECKING:
    from privmix.laboratory.audit.finding import Finding
    from privmix.privacy.settings import Settings

_API_KEY = "PRIVMIX_API_KEY"

audit = typer.Typer(
    name="audit", help="Attack the output of protocols, and compare the result with their claims.", no_args_is_help=True
)

Confidence = Annotated[float, typer.Option(min=0.5, max=1, help="The confidence of the lower bounds.")]
Directory = Annotated[Path, typer.Option("--directory", help="The directory for planted text and trained models.")]
Guesses = Annotated[float, typer.Option(min=0.01, max=1, help="The fraction of the coins to guess.")]
Budget = Annotated[Given, FieldsOf(ComparisonOptions(), BUDGET)]

DIRECTORY = Path("run/audit")


@audit.command()
@grouped
def plant(
    size: Annotated[Given, FieldsOf(AdjacentSize(), {"Size": tuple(AdjacentSize.model_fields)})],
    directory: Directory = DIRECTORY / "adjacent",
    as_json: JsonOption = False,
) -> None:
    """Train two ensembles with and without one user's text, the worst case for `privmix audit services`.

    Serve DIRECTORY/with and DIRECTORY/without with the same configuration and separate ledgers.
    """
    from privmix.laboratory.audit import adjacent

    Steps()("Training two ensembles (finished adapters are kept)")
    question = adjacent.plant(directory, AdjacentSize.checked(**size), display())
    if as_json:
        print(json.dumps({"directory": str(directory), **asdict(question)}, indent=2))
        return
    print(f"Serve {directory / adjacent.WITH} and {adjacent.WITHOUT}, and ask both, at 8,000 tokens:")
    print(f"  privmix audit services URL_WITH URL_WITHOUT --prompt {shlex.quote(question.prompt)}")


@audit.command()
def services(
    url_with: Annotated[str, typer.Argument(help="A running service.")],
    url_without: Annotated[str, typer.Argument(help="The same with one part's model replaced.")],
    prompt: Annotated[str, typer.Option(help="The prompt for both services.")] = "Caller: This is",
    releases: Annotated[int, typer.Option(min=100, help="Tokens to request of each; all are charged.")] = 4000,
    confidence: Confidence = 0.95,
    as_json: JsonOption = False,
) -> None:
    """Compare the answers of two running services by the likelihood-ratio test, the most powerful one.

    The claim is the one that the first service states for a token. PRIVMIX_API_KEY is sent to both.
    """
    from privmix.laboratory.audit import black_box

    Steps()(f"Asking both services for {releases} tokens each: every one of them is charged")
    key = os.environ.get(_API_KEY)
    present, absent = (black_box.collect_answers(url, prompt, releases, key) for url in (url_with, url_without))
    _finish("Likelihood-ratio test over HTTP", [black_box.audit(present, absent, confidence)], as_json)


@audit.command()
def published(
    parts: Annotated[list[int], typer.Option(min=2, help="N; may be repeated.")] = [8, 80],  # noqa: B006
    q: Annotated[list[float], typer.Option(min=1e-6, max=1, help="PMixED's p; may be repeated.")] = [1.0, 0.03],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(min=1, help="Tokens of a claim; may be repeated.")] = [1024],  # noqa: B006
    epsilon: Annotated[list[float], typer.Option(help="A budget of PMixED; may be repeated.")] = [8.0],  # noqa: B006
    delta: Annotated[float, typer.Option(help="The delta of the claims.")] = 1e-5,
    as_json: JsonOption = False,
) -> None:
    """Compute the cost of the published PMixED, AdaPMixED and SubMix in the worst known case, beside their claims.

    The arithmetic is exact. A claim may be exceeded, and this does not fail the audit. A pair that costs less than the
    claim proves nothing. AdaPMixED and SubMix have the settings of their papers, and no q.
    """
    from privmix.laboratory.audit import published as attack

    show_step, claims = Steps(), list[attack.Claim]()
    for of, count in product(parts, tokens):
        show_step(f"{of} parts, {count} tokens")
        try:
            for budget, drawn in product(epsilon, q):
                claims += attack.of_pmixed(of, drawn, budget, delta, count)
        except ValueError as error:
            raise bad("epsilon", str(error)) from error
        claims += [*attack.of_adapmixed(of, delta, count), *attack.of_submix(of, delta, count)]
    _print(
        f"Epsilon at delta {delta:g}: as stated, and of the worst known pair", [each.row() for each in claims], as_json
    )


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

    It reads the weights. The exit status is 1 if it finds a fault.
    """
    from privmix.laboratory.audit import private_base

    found = private_base.faults(ensemble, ledger, trained or ())
    if as_json:
        print(json.dumps({"faults": found}, indent=2))
    else:
        print("\n".join(f"fault: {fault}" for fault in found) or "no fault found")
    raise typer.Exit(bool(found))


@audit.command(name="extraction")
@grouped
def extraction_(
    size: Annotated[Given, FieldsOf(PlantedSize(), {"Testbed": tuple(PlantedSize.model_fields)})],
    budget: Budget,
    methods: MethodOptions,
    directory: Directory = DIRECTORY,
    attempts: Annotated[int, typer.Option(min=1, help="The number of completions for each secret.")] = 10,
    top_k: Annotated[int, typer.Option(min=1, help="The most likely tokens from which the attacker samples.")] = 64,
    draws: Annotated[
        int, typer.Option(min=1, help="The number of releases to average for a noisy or random protocol.")
    ] = 16,
    as_json: JsonOption = False,
) -> None:
    """Plant secrets in the demo corpus and measure how often each protocol outputs them.

    Trains an ensemble, and one model of the whole corpus, into DIRECTORY and keeps them. The hit rate is the
    probability that at least one attempt outputs the secret.
    """
    from privmix.laboratory.audit import extraction, testbed

    steps, planted = Steps(), PlantedSize.checked(**size)
    subjects = _subjects(ComparisonOptions.checked(**methods.values, **budget), planted.parts)
    halves = any(settings.mechanism.halves for _, settings in subjects)
    steps(f"Planting {planted.planted} secrets and training {planted.parts} parts (finished ones are kept)")
    known = testbed.train_testbed(directory, planted, halves=halves, display=display())
    steps(f"Asking the models for {len(known)} secrets")
    trained = testbed.evaluate_testbed(directory, known, top_k)
    results = []
    for result in extraction.attack_all(trained, subjects, attempts=attempts, draws=draws):
        steps(f"{result.mechanism}, epsilon {result.epsilon}")
        results.append(result)
    _print(f"Extraction of {len(trained.canaries)} secrets", [asdict(result) for result in results], as_json)
    if not extraction.is_strong(results):
        steps("The attack is too weak for a conclusion: even models without privacy do not output their secrets")


@audit.command()
def released(
    texts: Annotated[Path, typer.Argument(help="A job of `privmix generate`.")],
    directory: Annotated[
        Path,
        typer.Option("--directory", help="The directory of `privmix audit extraction`, whose ensemble wrote them."),
    ] = DIRECTORY,
    confidence: Confidence = 0.95,
    guesses: Guesses = 0.5,
    as_json: JsonOption = False,
) -> None:
    """Bound epsilon from below by released text alone: train a model on it, and guess who was planted.

    Trains into DIRECTORY. The claim is the one of the texts' card. A second row attacks the planted corpus itself: if
    its area under the curve is not near 1, the attack is too weak.
    """
    from privmix.laboratory.audit import released_text, testbed

    (canaries, corpus), read = testbed.planted(directory), released_text.read_released(texts)
    steps = Steps()
    steps(f"Training on {len(read.texts)} released texts (a finished model is kept)")
    trained = released_text.train_on(read, directory, display())
    steps(f"Asking the models for {len(canaries)} secrets")
    everything = released_text.ReleasedTexts("the planted corpus itself", ())
    scores, count = released_text.score((trained, corpus), canaries), round(guesses * len(canaries))
    findings = [
        released_text.audit(attacked, canaries, added, confidence, count)
        for attacked, added in zip((read, everything), scores, strict=True)
    ]
    _finish("Released text", findings, as_json)


def _subjects(options: ComparisonOptions, parts: int) -> "list[tuple[str, Settings]]":
    """Returns every protocol that `privmix evaluate` compares with these options, at each value of the sweep."""
    from privmix.laboratory.evaluation import methods

    return [
        (label if value is None else f"{label}, {options.sweep} {value}", settings)
        for value in options.points
        for label, settings in methods.chosen(options, value, parts, halves=True)
    ]


def _finish(title: str, findings: "Sequence[Finding]", as_json: bool) -> None:
    """Prints findings; exits with 1 if a claim is broken."""
    if as_json:
        print(json.dumps({"findings": [finding.record() for finding in findings]}, indent=2))
    else:
        show_table(title, [finding.row() for finding in findings])
    if any(finding.verdict == "broken" for finding in findings):
        raise typer.Exit(1)


def _print(title: str, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rows": rows}, indent=2))
    else:
        show_table(title, rows)
