"""Claim: `privmix audit` reports its findings; if a claim is broken, it names the claim and fails."""

from dataclasses import replace

import pytest

from privmix.laboratory.audit import black_box
from privmix.laboratory.audit.black_box import ServiceAnswers
from privmix.privacy.events import Event
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import RatioEvent
from tests.support.cli import privmix, refused, reported
from tests.support.worst_cases import pair_laws, worst_pairs


def test_the_published_claim_is_shown_to_be_exceeded_and_does_not_fail_the_audit() -> None:
    rows = reported("audit", "published", "--tokens", "64", "--parts", "8", "--q", "1")["rows"]
    exceeded = {row["claim"].partition(",")[0] for row in rows if row["exceeded"]}
    assert exceeded == {"PMixED", "AdaPMixED", "SubMix"}
    assert [row["exceeded"] for row in rows if row["claim"].startswith("PMixED here")] == [False]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["extraction", "--protocol", "magic"], "unknown: magic; choose from pmixed"),
        (["extraction", "--set", "q=7"], "q: pmixed does not take '7'"),
        (["extraction", "--planted", "1"], "planted: "),
        (["published", "--epsilon", "1"], "--epsilon"),
        (["released", "texts", "--directory", "nowhere"], "run `privmix audit extraction` first"),
    ],
)
def test_wrong_options_are_refused_by_name(options: list[str], named: str) -> None:
    assert named in refused("audit", *options)


def test_a_service_that_does_not_answer_is_named() -> None:
    result = privmix("audit", "services", "http://127.0.0.1:1", "http://127.0.0.1:2")
    assert result.exit_code == 1
    assert "service http://127.0.0.1:1: " in result.stderr


def test_a_broken_claim_fails_the_audit_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    event = RatioEvent(1, 1.0, 0.5)
    told = iter([simulated(0.8, event), simulated(0.2, event)])
    monkeypatch.setattr(black_box, "collect_answers", lambda *_: next(told))
    result = privmix("audit", "services", "http://with", "http://without")
    assert result.exit_code == 1
    assert "broken" in result.stdout
    assert "likelihood-ratio test over HTTP" in " ".join(result.stdout.split())


def simulated(chance: float, event: Event, count: int = 20_000) -> ServiceAnswers:
    """Returns the answer "a" with exactly its expected frequency, in shuffled order."""
    answers = ("a" if index * 7919 % count < chance * count else "b" for index in range(count))
    return ServiceAnswers(tuple(answers), event, 1e-5)


def test_answers_of_two_services_are_compared_with_the_claim() -> None:
    """With two equally likely tokens under p0, the only part may lower one to e^-0.5 / 2 = 0.303."""
    event = RatioEvent(1, 1.0, 0.5)
    sound = black_box.audit(simulated(0.69, event), simulated(0.31, event), 0.95)
    assert sound.verdict == "holds"
    assert 0.7 * sound.claim < sound.lower
    assert black_box.audit(simulated(0.8, event), simulated(0.2, event), 0.95).verdict == "broken"


def test_a_token_of_individual_budgets_is_compared_with_the_bound_of_one_token() -> None:
    """Accounts bound all tokens together, far above what one token tells; the bounds of tilts limit each token."""
    planned = IndividualSettings(epsilon=8.0, tokens=131_072, lower=0.5).plan(3)
    protocol = replace(planned, tokens=8)  # the narrow tilts of many tokens, each of which may charge much
    laws = [pair_laws(protocol, pair) for pair in worst_pairs(protocol.event, protocol)]
    present, absent = max(((p[0], q[0]) for p, q in laws), key=lambda pair: float(pair[0] - pair[1]))
    sound = black_box.audit(simulated(present, protocol.event), simulated(absent, protocol.event), 0.95)
    assert sound.claim == pytest.approx(0.179, abs=1e-3)
    assert sound.verdict == "holds"
    assert 0.4 * sound.claim < sound.lower
    # The planted fault: the mean of the parts' distributions, which no bound limits. Two of three parts say p0.
    public = 0.28
    unlimited = [simulated((own + 2 * public) / 3, protocol.event) for own in (1.0, 0.0)]
    assert black_box.audit(unlimited[0], unlimited[1], 0.95).verdict == "broken"
