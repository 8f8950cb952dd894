"""Claim: there is one draw a token, and a repeated step uses the draws of the first attempt."""

from privmix.coordinator.draws import Draws
from privmix.privacy.protocols.pmixed import PMixed


def test_a_draw_stays_until_its_token_is_computed() -> None:
    draws = Draws(PMixed(1000, 0.5, 0.4))
    for _ in range(5):
        first, other = draws.current("a"), draws.current("b")
        assert first != other
        draws.drop(["a", "unknown"])
        draws.drop(["a"])  # the sequence was cancelled during its step
        assert (draws.current("a") != first, draws.current("b")) == (True, other)
