"""Draws are made ahead, each for one token, and a repeated step uses the draws of the first."""

from services.coordinator.draws import AHEAD, DrawQueue
from services.privacy.protocols.pmixed import PMixed


def test_what_was_coming_is_drawn_in_that_order() -> None:
    queue = DrawQueue(PMixed(1000, 0.5, 0.4))
    for _ in range(5):
        current, coming = queue.current("a"), queue.coming("a")
        assert len(coming) == AHEAD
        assert (queue.current("a"), queue.coming("a")) == (current, coming), "until the token is made"
        queue.advance(["a"])
        assert queue.current("a") == coming[0]
        assert queue.coming("a")[: AHEAD - 1] == coming[1:]


def test_sequences_have_draws_of_their_own_and_none_stays_behind() -> None:
    queue = DrawQueue(PMixed(1000, 0.5, 0.4))
    first = queue.current("a")
    assert queue.current("b") != first
    queue.forget(["a", "unknown"])
    queue.advance(["a"])  # it was cancelled while its step went on
    assert queue.current("a") != first
