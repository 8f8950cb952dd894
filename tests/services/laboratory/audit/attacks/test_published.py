"""Claim: the counterexample to the published proof lies in the published ball and costs more than the claim."""

import pytest
import torch

from privmix.laboratory.audit.attacks import published
from privmix.laboratory.audit.worlds.distributions import answers
from privmix.privacy.mollifiers.renyi import mollify
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings
from privmix.privacy.worlds import Pair


def as_published(parts: int, q: float, tokens: int) -> PMixed:
    return PMixedSettings(mollifier="renyi", q=q, tokens=tokens, epsilon=8.0).plan(parts)


@pytest.mark.parametrize(("parts", "q", "tokens"), [(2, 1.0, 1024), (8, 1.0, 64), (80, 0.1, 1024)])
def test_the_published_claim_is_exceeded_and_the_certified_one_is_not(parts: int, q: float, tokens: int) -> None:
    theirs, ours = published.compare(parts, q, 8.0, 1e-5, tokens)
    assert theirs.verdict == "broken"
    assert theirs.status == "as published"
    assert theirs.details["token_divergence"] > 10 * theirs.details["token_divergence_claimed"]
    assert ours.verdict == "holds"
    assert ours.status == "certified"


def test_the_published_mollifier_does_not_change_the_parts_of_the_pair() -> None:
    """The parts lie in the ball for every number of drawn parts, so lambda is 1."""
    protocol = as_published(2, 1.0, 1024)
    pair: Pair = published.against(protocol, 1024, 1e-5).pair
    answered = answers(pair.before, [(0, 1)])
    kept = mollify(answered.ratios, answered.public[0], 3, 3 * published.smallest_beta(protocol))
    torch.testing.assert_close(kept, answered.ratios * answered.public[0], rtol=1e-4, atol=0)


def test_the_certified_mollifier_has_no_published_claim() -> None:
    with pytest.raises(ValueError, match="renyi"):
        published.against(PMixed(2, 1.0, 0.5), 10, 1e-5)
