"""Claim: the likelihood-ratio audit approaches a sound claim, never exceeds it, and detects a broken mechanism."""

from typing import Any

import numpy as np
import pytest

from privmix.laboratory.audit import distributions, likelihood
from privmix.laboratory.audit.variants import audited
from privmix.privacy.mollifiers import projection
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols import PROTOCOLS, subsample_aggregate
from privmix.privacy.protocols.exponential import Exponential, FixedSizeExponentialEvent
from privmix.privacy.protocols.gnmax import GNMax
from privmix.privacy.sampling.noise import discrete_laplace

DELTA = 1e-5
CERTIFIED = list(audited(3))


def planned(name: str, parts: int, tokens: int, epsilon: float = 2.0, **parameters: Any) -> Protocol:
    return PROTOCOLS[name].model_validate({"epsilon": epsilon, "tokens": tokens, **parameters}).plan(parts)


@pytest.mark.parametrize(("name", "parameters"), CERTIFIED)
def test_a_certified_claim_holds(name: str, parameters: dict[str, Any]) -> None:
    tokens = 64 if name == "individual" else 4  # one token cannot spend much of an account
    protocol = planned(name, 3, tokens, **parameters)
    finding = likelihood.audit(protocol, tokens=tokens, delta=DELTA, releases=1_000 * tokens)
    assert finding.verdict != "broken", finding.sentence
    assert finding.exact is not None
    assert 0.2 * finding.claim < finding.exact <= finding.claim


@pytest.mark.parametrize("by", ["clip", "mix"])
@pytest.mark.parametrize(("parts", "tokens"), [(1, 1), (4, 1), (4, 64), (16, 1024)])
def test_the_corners_reach_the_claim_of_pmixed(parts: int, tokens: int, by: str) -> None:
    protocol = planned("pmixed", parts, tokens, projection=by)
    claim = likelihood.claims_of(protocol.event, tokens, DELTA)["PLD"]
    assert 0.94 * claim < likelihood.exact(protocol, tokens=tokens, delta=DELTA) <= claim


def test_tokens_alone_come_close_to_the_claim() -> None:
    finding = likelihood.audit(planned("pmixed", 2, 1), tokens=1, delta=DELTA, releases=40_000)
    assert 0.8 * finding.claim < finding.lower
    assert finding.certain <= finding.lower
    assert finding.verdict != "broken"


def test_a_projection_at_twice_the_radius_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clip", "mix"):
        project = getattr(projection, name)
        monkeypatch.setattr(
            projection, name, lambda u, p0, radius, out, project=project: project(u, p0, 2 * radius, out)
        )
        protocol = planned("pmixed", 3, 1, epsilon=1.0, projection=name)
        finding = likelihood.audit(protocol, tokens=1, delta=DELTA, releases=20_000)
        assert finding.verdict == "broken"
        assert finding.certain > finding.claim, "the tokens alone prove it"
        assert finding.broken_claims == ("Rényi", "PLD")


def test_an_exponential_mechanism_with_a_larger_radius_is_caught() -> None:
    claimed = FixedSizeExponentialEvent(2, 2, 0.5)
    exact = likelihood.audit(Exponential(2, 2, 1.0), tokens=1, delta=DELTA, claimed=claimed, releases=100)
    assert exact.verdict == "broken"
    protocol = Exponential(2, 2, 3.0)
    finding = likelihood.audit(protocol, tokens=1, delta=DELTA, claimed=claimed, releases=40_000)
    assert finding.certain > finding.claim


def test_too_little_noise_on_sums_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = planned("subsample-aggregate", 3, 1)
    monkeypatch.setattr(subsample_aggregate, "discrete_laplace", lambda sums, scale: discrete_laplace(sums, scale / 16))
    finding = likelihood.audit(protocol, tokens=1, delta=DELTA, releases=40_000)
    assert finding.certain > finding.claim


def test_half_the_noise_on_votes_is_caught() -> None:
    """The exact distributions detect it; a few thousand tokens reveal too little of the votes."""
    sound = planned("gnmax", 3, 16)
    assert isinstance(sound, GNMax)
    finding = likelihood.audit(GNMax(3, sound.sigma / 2), tokens=16, delta=DELTA, claimed=sound.event, releases=1_000)
    assert finding.verdict == "broken"


@pytest.mark.parametrize(("name", "parameters"), CERTIFIED)
def test_tokens_follow_their_distribution(name: str, parameters: dict[str, Any]) -> None:
    """Each token's count is within six standard deviations, which chance violates once in 10^8 runs."""
    protocol = planned(name, 3, 1, **parameters)
    pair = distributions.worst_pair(protocol, protocol.event, 4.0)
    count = 2_000 if protocol.noisy else 5_000
    for world in (pair.before, pair.after):
        law = distributions.token_law(protocol, world)
        np.testing.assert_allclose(law, distributions.described_law(protocol, world), atol=2e-4)
        counts = np.bincount(distributions.tokens(protocol, world, count), minlength=len(law))
        assert law.sum() == pytest.approx(1)
        assert (np.abs(counts - count * law) <= 6 * np.sqrt(count * law * (1 - law)) + 1).all()


def test_epsilon_of_two_tokens_agrees_with_that_of_three() -> None:
    """Enumeration of counts and composition of privacy loss distributions give the same epsilon for one pair."""
    p, q = np.array([0.3, 0.7]), np.array([0.2, 0.8])
    split_p, split_q = (np.array([law[0], law[1] / 2, law[1] / 2]) for law in (p, q))
    for tokens in (1, 10, 200):
        counted = distributions.tokens_epsilon(p, q, tokens, DELTA)
        assert distributions.tokens_epsilon(split_p, split_q, tokens, DELTA) == pytest.approx(
            counted, abs=1e-5 * tokens + 1e-6
        )


def test_a_token_that_only_one_world_can_release_has_infinite_epsilon() -> None:
    assert distributions.tokens_epsilon(np.array([0.1, 0.9]), np.array([0.0, 1.0]), 3, DELTA) == np.inf


def test_references_have_no_worst_case() -> None:
    with pytest.raises(distributions.NoPairError, match="ensemble"):
        likelihood.audit(PROTOCOLS["ensemble"].model_validate({}).plan(3), tokens=1, delta=DELTA)
