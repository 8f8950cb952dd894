"""Each attack as a section of the report: what is run, and the words that go with it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.audit.attacks import extraction, likelihood, membership, one_run, published
from services.audit.attacks.extraction import Extracted
from services.audit.attacks.frequencies import audit_draws
from services.audit.attacks.membership import Seen
from services.audit.attacks.releases import audit_releases
from services.audit.report.finding import Finding
from services.audit.report.page import Section, bars, roc_figure
from services.audit.worlds.distributions import NoPairError
from services.audit.worlds.shadow_ensembles import Shadows
from services.audit.worlds.testbed import Testbed
from services.privacy.protocol import Protocol
from services.privacy.protocols.ensemble import Ensemble
from services.privacy.protocols.finetuned import Finetuned
from services.privacy.protocols.public import Public
from services.privacy.settings import Settings

Say = Callable[[str], None]

PUBLISHED: Sequence[tuple[int, float]] = ((2, 1.0), (8, 1.0), (80, 1.0), (80, 0.1), (80, 0.03))
"""Parts and q of the comparison; the last are the paper's."""

# Hit rates below it are drawn as this.
_LEAST_SHOWN = 1e-8


@dataclass(frozen=True)
class Subject:
    """A protocol as it is set for a budget.

    Attributes:
        name: for people.
        protocol: planned for `tokens` at `epsilon`.
        settings: of which it was planned.
    """

    name: str
    protocol: Protocol
    tokens: int
    epsilon: float
    settings: Settings | None = None


def likelihood_section(
    subjects: Sequence[Subject], delta: float, releases: int, confidence: float, say: Say
) -> Section:
    """Every subject under the likelihood-ratio test.

    Raises:
        NoPairError: no worst case is known of a subject.
    """
    audited = []
    for subject in subjects:
        say(f"{subject.name}, {subject.tokens} tokens")
        audited.append(
            likelihood.audit(
                subject.protocol,
                tokens=subject.tokens,
                delta=delta,
                releases=releases,
                confidence=confidence,
                subject=subject.name,
            )
        )
    findings = [each.finding for each in audited]
    curves = {f"{each.finding.subject}, tokens: {each.finding.details['tokens']}": each.roc for each in audited}
    bounds = {f"epsilon {epsilon:g}": (epsilon, delta) for epsilon in sorted({each.epsilon for each in subjects})}
    return Section(
        title="Likelihood-ratio test",
        text=(
            "The auditor knows both ensembles and everything but the randomness, and sees the tokens of some queries. "
            "Lower bounds come from tokens that were really drawn and sampled (Clopper-Pearson, the threshold chosen "
            "on other trials); the exact epsilon is that of the very pair attacked, and says how tight the accounting "
            "is."
        ),
        findings=findings,
        figures={
            "Claims, and what is shown of them": bars(findings),
            "One part's model replaced": roc_figure(curves, bounds),
        },
    )


def mechanism_section(subjects: Sequence[Subject], draws: int, say: Say) -> Section:
    """The draws of every subject against their law, and its releases against its formula."""
    findings: list[Finding] = []
    for subject in {each.name: each for each in subjects}.values():
        say(f"{subject.name}, {draws} draws")
        findings.append(audit_draws(subject.protocol, draws, subject.name))
        released = audit_releases(subject.protocol, subject.name)
        findings += [] if released is None else [released]
    return Section(
        title="Draws and releases",
        text=(
            "How many parts are drawn for a token, which, and how often the same twice running, against what the "
            "protocol describes: exact binomial tests, together wrong once in a million audits. What is released is "
            "compared with the published formula, on distributions of the worst case and on random ones: exact, no "
            "statistics. A protocol whose noise leaves no formula is compared by its tokens alone, above."
        ),
        findings=findings,
        rows=[
            {
                "mechanism": each.subject,
                "compared": each.attack,
                "draws": each.details.get("draws"),
                "tests": each.details.get("tests"),
                "largest difference": each.details.get("largest difference"),
                "refuted": "; ".join(each.refuted) or "nothing",
                "verdict": each.verdict,
            }
            for each in findings
        ],
    )


def published_section(epsilons: Sequence[float], tokens: Sequence[int], delta: float, say: Say) -> Section:
    """One comparison for each setting.

    Raises:
        ValueError: a budget leaves nothing to spend at the published order.
    """
    findings: list[Finding] = []
    rows: list[Mapping[str, Any]] = []
    for parts, q in PUBLISHED:
        for epsilon in epsilons:
            for count in tokens:
                say(f"{parts} parts, q {q:g}, epsilon {epsilon:g}, {count} tokens")
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
    return Section(
        title="PMixED as published",
        text=(
            "Algorithm 1 of Flemings et al. 2024 bounds each part's Rényi divergence to the public model at one order; "
            "the proof of its Theorem 5.1 uses the bound at every order. On a token that is rare under the public "
            "model two parts may both keep to the bound and still be far apart. For each setting the table has what "
            "the tokens of such a pair cost, computed exactly, beside what is claimed: epsilon for all of them, and "
            "the divergence of one token at the published order, 3. Where the pair costs less than is claimed, nothing "
            "is shown. The certified mollifier bounds the likelihood ratio itself."
        ),
        findings=findings,
        rows=rows,
        known=True,
    )


def extraction_section(
    testbed: Testbed, subjects: Sequence[Subject], attempts: int, draws: int, say: Say, served: float | None = None
) -> Section:
    """Every mechanism on the canaries that are in the corpus.

    Args:
        served: the hit rate that a running service had, where it was asked.

    Raises:
        InputError: the testbed lacks a subject's models.
    """
    outputs = {canary: testbed.outputs[canary] for canary in testbed.canaries}
    every = dict.fromkeys(outputs, range(testbed.parts))
    references: list[tuple[str, Protocol, float | None, Mapping[Any, Sequence[int]]]] = [
        ("public model", Public(testbed.parts), 0.0, every),
        ("one model of the whole corpus", Finetuned(1), None, dict.fromkeys(outputs, (testbed.parts,))),
        ("the part that has the secret", Finetuned(1), None, {canary: (testbed.part[canary],) for canary in outputs}),
        ("ensemble, without privacy", Ensemble(testbed.parts), None, every),
    ]
    attack = partial(extraction.attack, outputs=outputs, attempts=attempts, draws=draws)
    results = [attack(name, protocol, epsilon, models=models) for name, protocol, epsilon, models in references]
    for subject in subjects:
        say(f"{subject.name}, epsilon {subject.epsilon:g}")
        models = dict.fromkeys(outputs, testbed.models(subject.protocol))
        results.append(
            attack(subject.name, subject.protocol, subject.epsilon, models=models, settings=subject.settings)
        )
    rows = [result.row() for result in results]
    if served is not None:
        rows.append({"mechanism": "the running service, by its answers", "hit rate": served})
    weak = extraction.too_weak(results)
    return Section(
        title="Extraction",
        text=(
            f"{len(outputs)} secrets of six digits were planted in the demo corpus. The attacker asks {attempts} times "
            "with the text before the secret; the hit rate is the chance that one of the answers is the secret. "
            "Exposure and rank are among random candidates, by their chances under the released distributions. Where "
            "what a token costs depends on the text, every attempt has a whole budget, and the public model answers "
            "from its end. "
            + (
                "THE ATTACK IS TOO WEAK TO MEAN ANYTHING: no model without privacy gives its secrets away."
                if weak
                else "Without privacy the secrets come out, so the attack means something."
            )
        ),
        rows=rows,
        figures={"What the attack gets": _against_epsilon(results)},
    )


def one_run_section(
    subjects: Sequence[Subject],
    on_testbed: Sequence[Subject],
    testbed: Testbed | None,
    queries: int,
    delta: float,
    confidence: float,
    guesses: float,
    say: Say,
) -> Section:
    """Planted parts, for every subject that has a worst case for them, and the planted users of a trained testbed.

    Args:
        on_testbed: the subjects with as many parts as the testbed.
        guesses: the share of the coins that is guessed.
    """
    findings = []
    for subject in subjects:
        say(f"{subject.name}: {subject.protocol.parts} planted parts")
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
            say(str(error))
    for subject in on_testbed if testbed else ():
        assert testbed is not None  # or there would be no subject
        say(f"{subject.name}: {len(testbed.outputs)} planted users")
        findings += one_run.of_users(
            subject.protocol,
            testbed,
            queries=queries,
            delta=delta,
            confidence=confidence,
            guesses=round(guesses * len(testbed.outputs)),
            subject=f"{subject.name}, trained",
        )
    return Section(
        title="One run",
        text=(
            "Each of the planted is included by a fair coin, and one attacker guesses the coins from the tokens "
            "(Steinke, Nasr, Jagielski 2023). The bound is for all guesses together; since every one of the planted "
            "is asked about by a few of the tokens alone, it is far below the claim for all of them. The bound by the "
            "trade-off curve (Mahloujifar, Melis, Chaudhuri 2024) takes the curve to be that of some number of tokens "
            "of the claimed event, and says epsilon of the most tokens that the guesses rule out."
        ),
        findings=findings,
    )


def membership_section(shadows: Shadows, subjects: Sequence[Subject], delta: float, draws: int, say: Say) -> Section:
    """The curve of every mechanism, and what it has at few false positives."""
    say("scoring")
    ensemble = Ensemble(shadows.parts)
    mechanisms = {
        "ensemble, without privacy": Seen(ensemble),
        **{
            f"ensemble, {tokens} of its tokens": Seen(ensemble, tokens)
            for tokens in sorted({s.tokens for s in subjects})
        },
        **{f"{s.name}, epsilon {s.epsilon:g}": Seen(s.protocol, s.tokens, s.settings) for s in subjects},
    }
    curves = membership.attack(mechanisms, shadows, draws)
    rows = [
        {
            "mechanism": name,
            "area under the curve": curve.area,
            "true positives at 0.1 %": curve.true_positives_at(1e-3),
            "true positives at 1 %": curve.true_positives_at(1e-2),
        }
        for name, curve in curves.items()
    ]
    count = shadows.included.size
    bounds = {f"epsilon {subject.epsilon:g}": (subject.epsilon, delta) for subject in subjects}
    return Section(
        title="Membership inference",
        text=(
            f"LiRA (Carlini et al. 2022) with {len(shadows.included)} shadow ensembles of {shadows.parts} parts, each "
            f"attacked with what the others teach; {count} guesses in all, so that rates below {2 / count:.2g} say "
            "nothing. About each user the attacker asks for all tokens of the budget, spread over the places of the "
            "user's text; the score is how often the text's own tokens come. Where what a token costs depends on the "
            "text, the public model answers from the budget's end. In the first row it is their mean log-chance, "
            "from the probabilities themselves."
        ),
        rows=rows,
        figures={"LiRA": roc_figure(curves, bounds)},
    )


def _against_epsilon(results: Sequence[Extracted]) -> Figure:
    """Hit rate and exposure, a line for each private mechanism, and dotted lines for the others."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _lines(left, results, lambda result: max(result.hit_rate, _LEAST_SHOWN))
    left.set(ylabel="hit rate", yscale="log", ylim=(_LEAST_SHOWN, 2))
    _lines(right, results, lambda result: result.exposure)
    right.set(ylabel="exposure, bits", ylim=(0, None))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _lines(axes: Axes, results: Sequence[Extracted], quantity: Callable[[Extracted], float]) -> None:
    private: dict[str, list[tuple[float, float]]] = {}
    others: dict[int, list[Extracted]] = {}
    for result in results:
        if result.epsilon:
            private.setdefault(result.mechanism, []).append((result.epsilon, quantity(result)))
        else:
            # What lies close together is named together.
            others.setdefault(round(math.log2(max(quantity(result), _LEAST_SHOWN))), []).append(result)
            axes.axhline(quantity(result), linestyle=":", color="gray")
    for name, points in private.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", markersize=4, label=name)
    for close in others.values():
        names, place = "; ".join(each.mechanism for each in close), axes.get_yaxis_transform()
        axes.text(0.99, quantity(close[0]), names, fontsize=7, transform=place, ha="right", va="bottom")
    epsilons = sorted({result.epsilon for result in results if result.epsilon})
    axes.set(xlabel="epsilon", xscale="log")
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
