"""Claim: `privmix audit` reports its findings; if a claim is broken, it names the claim and fails."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from privmix.laboratory.audit import black_box, sections
from privmix.laboratory.audit.black_box import RepeatedRequest, ServiceAnswers
from privmix.laboratory.audit.distributions import pair_laws
from privmix.privacy.events import Event
from privmix.privacy.mollifiers import projection
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import RatioEvent
from tests.running import RunningService
from tests.support.cli import privmix

LIKELIHOOD = ["likelihood", "--parts", "2", "--tokens", "1", "--releases", "6000"]
PUBLISHED = ["published", "--tokens", "64"]


def run(*options: str) -> Result:
    return privmix("audit", *options)


def record(result: Result) -> dict[str, Any]:
    return dict(json.loads(result.stdout))


def test_sound_protocols_pass() -> None:
    # At the default confidence of 0.95 a bound may exceed the claim by chance in one run of twenty.
    options = ["--projection", "mix", "--confidence", "0.999999", "--json"]
    result = run(*LIKELIHOOD, "--protocol", "pmixed", *options)
    assert result.exit_code == 0, result.output
    section = record(result)["sections"][0]
    (finding,) = section["findings"]
    assert finding["details"]["adjacency"] == "user"
    assert finding["subject"] == "pmixed, projection mix"
    assert 0.5 < finding["tightness"] <= 1
    assert finding["certain"] <= finding["exact"] <= finding["claims"]["PLD"] < finding["claims"]["Rényi"]
    assert record(result)["broken"] == []


@pytest.mark.parametrize("name", ["clip", "mix"])
def test_a_broken_mechanism_fails_the_audit_and_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mechanism projects to twice the charged radius."""
    project = getattr(projection, name)
    monkeypatch.setattr(projection, name, lambda u, p0, radius, out: project(u, p0, 2 * radius, out))
    result = run(*LIKELIHOOD, "--protocol", "pmixed", "--projection", name, "--epsilon", "1")
    assert result.exit_code == 1
    assert f"broken: pmixed, projection {name}: the likelihood-ratio test proves" in result.stdout
    assert "above the claim of Rényi and PLD" in result.stdout


def test_the_published_claim_is_shown_to_be_exceeded_and_does_not_fail_the_audit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sections, "PUBLISHED", ((2, 1.0), (8, 1.0)))
    result = run(*PUBLISHED, "--json")
    assert result.exit_code == 0, result.output
    rows = record(result)["sections"][0]["rows"]
    exceeded = [row for row in rows if row["published: epsilon of the pair"] > row["claimed"]]
    assert exceeded
    assert all(row["certified: epsilon of the pair"] <= row["certified: claimed (PLD)"] for row in rows)
    assert "Theorem 5.1" in record(result)["sections"][0]["text"]


def test_people_read_a_table() -> None:
    result = run("one-run", "--protocol", "pmixed", "--parts", "8", "--queries", "2")
    assert result.exit_code == 0, result.output
    for piece in ("One run", "right guesses", "of 4", "holds"):
        assert piece in result.stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["likelihood", "--protocol", "ensemble"], "--protocol"),
        (["likelihood", "--protocol", "magic"], "--protocol"),
        (["likelihood", "--q", "0.5"], "--protocol"),
        (["likelihood", "--protocol", "pmixed", "--epsilon", "1e-9"], "--epsilon"),
        (["likelihood", "--url-with", "http://127.0.0.1:1"], "--url-without"),
        (["published", "--epsilon", "1"], "--epsilon"),
    ],
)
def test_wrong_options_are_refused_by_name(options: list[str], named: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert named in result.stderr.replace("'", "")


def test_a_directory_without_a_testbed_is_refused(tmp_path: Path) -> None:
    result = run("one-run", "--parts", "4", "--protocol", "pmixed", "--directory", str(tmp_path))
    assert result.exit_code == 2
    assert "audit extraction" in result.stderr


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
    laws = [pair_laws(protocol, pair) for pair in protocol.worst_pairs()]
    present, absent = max(((p[0], q[0]) for p, q in laws), key=lambda pair: float(pair[0] - pair[1]))
    sound = black_box.audit(simulated(present, protocol.event), simulated(absent, protocol.event), 0.95)
    assert sound.claims["Rényi"] == pytest.approx(8.0)
    assert sound.claim == sound.claims["one token"] == pytest.approx(0.179, abs=1e-3)
    assert sound.verdict == "holds"
    assert 0.4 * sound.claim < sound.lower
    # The planted fault: the mean of the parts' distributions, which no bound limits. Two of three parts say p0.
    public = 0.28
    unlimited = [simulated((own + 2 * public) / 3, protocol.event) for own in (1.0, 0.0)]
    assert black_box.audit(unlimited[0], unlimited[1], 0.95).verdict == "broken"


@pytest.mark.slow
def test_the_audit_of_one_service_against_itself_proves_nothing_and_charges_every_token(
    service: RunningService,
) -> None:
    before = service.privacy()["tokens_charged"]
    both = [black_box.collect_answers(service.base_url, RepeatedRequest("The weather is"), 256, None) for _ in range(2)]
    finding = black_box.audit(both[0], both[1], 0.95)
    assert finding.certain == 0
    assert service.privacy()["tokens_charged"] >= before + 512
