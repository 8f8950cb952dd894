"""Runs each attack and describes it in a section of the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from privmix.laboratory.audit import (
    extraction,
    likelihood,
    one_run,
    published,
    released_text,
)
from privmix.laboratory.audit.canaries import SAMPLED_TOKENS, Canary
from privmix.laboratory.audit.distributions import NoPairError
from privmix.laboratory.audit.finding import Finding
from privmix.laboratory.audit.frequencies import audit_draws
from privmix.laboratory.audit.page import AttackSection
from privmix.laboratory.audit.released_text import ReleasedTexts
from privmix.laboratory.audit.releases import audit_releases
from privmix.laboratory.audit.roc import Roc
from privmix.laboratory.audit.sampled_secrets import TEMPERATURE
from privmix.laboratory.audit.testbed import Testbed
from privmix.privacy.arrays import Reals
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.ensemble import Ensemble
from privmix.privacy.protocols.finetuned import Finetuned
from privmix.privacy.protocols.public import Public
from privmix.privacy.settings import Settings

ShowStep = Callable[[str], None]
"""Shows the user a step of the work."""

PUBLISHED: Sequence[tuple[int, float]] = ((2, 1.0), (8, 1.0), (80, 1.0), (80, 0.1), (80, 0.03))
"""The numbers of parts and values of q in the comparison; the last pair is the paper's."""


@dataclass(frozen=True)
class Subject:
    """A protocol that is planned for a budget.

    Attributes:
        name: the name in tables.
        protocol: the protocol, planned for `tokens` at `epsilon`.
        settings: the settings that it was planned from.
    """

    name: str
    protocol: Protocol
    tokens: int
    epsilon: float
    settings: Settings | None = None


def likelihood_section(
    subjects: Sequence[Subject], delta: float, releases: int, confidence: float, show_step: ShowStep
) -> AttackSection:
    """Runs the likelihood-ratio test on every subject.

    Raises:
        NoPairError: no worst case is known for a subject.
    """
    findings = []
    for subject in subjects:
        show_step(f"{subject.name}, {subject.tokens} tokens")
        findings.append(
            likelihood.audit(
                subject.protocol,
                tokens=subject.tokens,
                delta=delta,
                releases=releases,
                confidence=confidence,
                subject=subject.name,
            )
        )
    return AttackSection(
        title="Likelihood-ratio test",
        text=(
            "The auditor knows both ensembles and everything except the randomness, and observes the tokens of some "
            "queries. The lower bounds come from tokens of the serving code's draws and sampling (Clopper-Pearson; "
            "separate trials choose the threshold). The exact epsilon is computed from the distributions of the "
            "attacked pair; it shows how tight the accounting is."
        ),
        findings=findings,
    )


def mechanism_section(subjects: Sequence[Subject], draws: int, show_step: ShowStep) -> AttackSection:
    """Compares the draws of every subject with their distribution and its releases with its formula."""
    findings: list[Finding] = []
    for subject in {subject.name: subject for subject in subjects}.values():
        show_step(f"{subject.name}, {draws} draws")
        findings.append(audit_draws(subject.protocol, draws, subject.name))
        exact = audit_releases(subject.protocol, subject.name)
        findings += [] if exact is None else [exact]
    return AttackSection(
        title="Draws and releases",
        text=(
            "Exact binomial tests compare the number of drawn parts, each part's frequency, and repeated draws with "
            "the protocol's description; their joint false-alarm rate is one in a million audits. Releases are "
            "compared exactly with the published formula, on worst-case distributions and on random ones. A protocol "
            "whose noise has no such formula is compared by its tokens alone, in the likelihood-ratio test."
        ),
        findings=findings,
        rows=[
            {
                "mechanism": finding.subject,
                "compared": finding.attack,
                "draws": finding.details.get("draws"),
                "tests": finding.details.get("tests"),
                "largest difference": finding.details.get("largest difference"),
                "refuted": "; ".join(finding.refuted) or "nothing",
                "verdict": finding.verdict,
            }
            for finding in findings
        ],
    )


def published_section(
    epsilons: Sequence[float], tokens: Sequence[int], delta: float, show_step: ShowStep
) -> AttackSection:
    """Compares PMixED as published with the certified mollifier, in each setting.

    Raises:
        ValueError: a budget leaves nothing to spend at the published order.
    """
    findings: list[Finding] = []
    rows: list[Mapping[str, Any]] = []
    for parts, q in PUBLISHED:
        for epsilon in epsilons:
            for count in tokens:
                show_step(f"{parts} parts, q {q:g}, epsilon {epsilon:g}, {count} tokens")
                theirs, ours = published.compare(parts, q, epsilon, delta, count)
                findings += [theirs, ours]
                rows.append(
                    {
                        "parts": parts,
                        "q": q,
                        "tokens": count,
                        "claimed": epsilon,
                        "published: epsilon of the pair": theirs.exact,
                        "a token's divergence, claimed": theirs.details["token_divergence_claimed"],
                        "of the pair": theirs.details["token_divergence"],
                        "certified: claimed (PLD)": ours.claims["PLD"],
                        "certified: epsilon of the pair": ours.exact,
                    }
                )
    return AttackSection(
        title="PMixED as published",
        text=(
            "Algorithm 1 of Flemings et al. 2024 bounds each part's Rényi divergence to the public model at one order; "
            "the proof of its Theorem 5.1 uses the bound at every order. On a token that is rare under the public "
            "model, two parts may both satisfy the bound and still be far apart. For each setting, the table compares "
            "the exact cost of such a pair with the claim: the epsilon of all tokens, and the divergence of one token "
            "at the published order, 3. A pair that costs less than the claim proves nothing. The certified mollifier "
            "bounds the likelihood ratio itself."
        ),
        findings=findings,
        rows=rows,
        known=True,
    )


def extraction_section(
    testbed: Testbed,
    subjects: Sequence[Subject],
    attempts: int,
    draws: int,
    show_step: ShowStep,
    served: float | None = None,
) -> AttackSection:
    """Attacks every mechanism with the canaries in the corpus.

    Args:
        served: the hit rate of a running service, if the audit queried one.

    Raises:
        InputError: the testbed lacks a subject's models.
    """
    outputs = {canary: testbed.outputs[canary] for canary in testbed.canaries}
    all_parts = dict.fromkeys(outputs, range(testbed.parts))
    references: list[tuple[str, Protocol, float | None, Mapping[Any, Sequence[int]]]] = [
        ("public model", Public(testbed.parts), 0.0, all_parts),
        ("one model of the whole corpus", Finetuned(1), None, dict.fromkeys(outputs, (testbed.parts,))),
        ("the part that has the secret", Finetuned(1), None, {canary: (testbed.part[canary],) for canary in outputs}),
        ("ensemble, without privacy", Ensemble(testbed.parts), None, all_parts),
    ]
    attack = partial(extraction.attack, outputs=outputs, attempts=attempts, draws=draws)
    results = [attack(name, protocol, epsilon, models=models) for name, protocol, epsilon, models in references]
    for subject in subjects:
        show_step(f"{subject.name}, epsilon {subject.epsilon:g}")
        models = dict.fromkeys(outputs, testbed.models(subject.protocol))
        results.append(
            attack(subject.name, subject.protocol, subject.epsilon, models=models, settings=subject.settings)
        )
    rows = [result.row() for result in results]
    if served is not None:
        rows.append({"mechanism": "the running service, by its answers", "hit rate": served})
    weak = extraction.too_weak(results)
    return AttackSection(
        title="Extraction",
        text=(
            f"The demo corpus contains {len(outputs)} planted secrets of {_described(testbed.canaries)}. The attacker "
            f"sends the text before the secret {attempts} times; the hit rate is the probability that at least one "
            "answer is the secret. Exposure and rank compare the secret with random candidates by their probabilities "
            "under the released distributions. If the cost of a token depends on the text, every attempt has a full "
            "budget, and the public model answers after its end. "
            + (
                "THE ATTACK IS TOO WEAK FOR A CONCLUSION: even models without privacy do not output their secrets."
                if weak
                else "Without privacy, the models output the secrets, so the attack is strong enough."
            )
        ),
        rows=rows,
    )


def one_run_section(
    subjects: Sequence[Subject],
    on_testbed: Sequence[Subject],
    testbed: Testbed | None,
    queries: int,
    delta: float,
    confidence: float,
    guesses: float,
    show_step: ShowStep,
) -> AttackSection:
    """Audits planted parts of every subject with a known worst case, and the planted users of a trained testbed.

    Args:
        on_testbed: the subjects with as many parts as the testbed.
        guesses: the fraction of the coins to guess.
    """
    findings = []
    for subject in subjects:
        show_step(f"{subject.name}: {subject.protocol.parts} planted parts")
        try:
            findings += one_run.of_parts(
                subject.protocol,
                queries=queries,
                delta=delta,
                confidence=confidence,
                guesses=round(guesses * subject.protocol.parts),
                subject=subject.name,
            )
        except NoPairError as error:
            show_step(str(error))
    for subject in on_testbed if testbed else ():
        assert testbed is not None  # the loop has no subjects without a testbed
        show_step(f"{subject.name}: {len(testbed.outputs)} planted users")
        findings += one_run.of_users(
            subject.protocol,
            testbed,
            queries=queries,
            delta=delta,
            confidence=confidence,
            guesses=round(guesses * len(testbed.outputs)),
            subject=f"{subject.name}, trained",
        )
    return AttackSection(
        title="One run",
        text=(
            "A fair coin includes or excludes each planted part or user, and one attacker guesses the coins from the "
            "tokens (Steinke, Nasr, Jagielski 2023). The bound uses all guesses together. Because only a few of the "
            "tokens concern each planted part or user, it is far below the claim for all tokens. The bound by the "
            "trade-off curve (Mahloujifar, Melis, Chaudhuri 2024) assumes the curve of some number of tokens of the "
            "claimed event, and reports the epsilon of the largest number that the guesses rule out."
        ),
        findings=findings,
    )


def released_section(
    released: ReleasedTexts,
    canaries: Sequence[Canary],
    scores: Reals,
    of_the_corpus: Reals,
    confidence: float,
    guesses: float,
) -> AttackSection:
    """Audits released texts, beside the planted corpus itself as if it were released.

    Args:
        scores, of_the_corpus: what the models of the texts and of the corpus add to each canary, float64 [canaries].
        guesses: the fraction of the coins to guess.
    """
    corpus = ReleasedTexts("the planted corpus itself", ())
    count = round(guesses * len(canaries))
    findings = [
        released_text.find(texts, canaries, added, confidence, count)
        for texts, added in ((released, scores), (corpus, of_the_corpus))
    ]
    included = np.array([canary.included for canary in canaries])
    areas = [Roc.of(added[included], added[~included]).area for added in (scores, of_the_corpus)]
    weak = areas[1] < extraction.LEAKS
    return AttackSection(
        title="Released text",
        text=(
            f"A fair coin included each of {len(canaries)} planted users. A model is trained on the released text "
            "alone; what it adds to the log-probability of each secret decides the guess. The second row trains on the "
            "corpus itself, which shows what the attack can find. "
            + (
                "THE ATTACK IS TOO WEAK FOR A CONCLUSION: it does not even find the secrets of the corpus itself."
                if weak
                else "It finds the secrets of the corpus itself, so it is strong enough."
            )
        ),
        findings=findings,
        rows=[
            {
                "trained on": finding.subject,
                "claimed epsilon": finding.claim,
                "area under the curve": area,
                "right guesses": f"{finding.details['correct']} of {finding.details['guesses']}",
                "lower bound": finding.lower,
                "verdict": finding.verdict,
            }
            for finding, area in zip(findings, areas, strict=True)
        ],
    )


def _described(canaries: Sequence[Canary]) -> str:
    """Names the secrets: all are of one kind."""
    if any(canary.others for canary in canaries):
        return f"{SAMPLED_TOKENS} tokens, which the public model sampled at temperature {TEMPERATURE:g}"
    return "six digits"
