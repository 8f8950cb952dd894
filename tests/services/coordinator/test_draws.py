"""Claim: draws are made ahead, one per token, and a repeated step uses the draws of the first attempt."""

from privmix.coordinator.draws import AHEAD, DrawQueue
from privmix.privacy.protocols.pmixed import PMixed


def test_upcoming_draws_are_used_in_order() -> None:
    queue = DrawQueue(PMixed(1000, 0.5, 0.4))
    for _ in range(5):
        current, coming = queue.current("a"), queue.coming("a")
        assert len(coming) == AHEAD
        assert (queue.current("a"), queue.coming("a")) == (current, coming), (
            "the draw stays the same until its token is released"
        )
        queue.advance(["a"])
        assert queue.current("a") == coming[0]
        assert queue.coming("a")[: AHEAD - 1] == coming[1:]


def test_sequences_have_their_own_draws_and_ended_ones_are_removed() -> None:
    queue = DrawQueue(PMixed(1000, 0.5, 0.4))
    first, other = ((queue.current(sequence), *queue.coming(sequence)) for sequence in "ab")
    assert first != other
    queue.forget(["a", "unknown"])
    queue.advance(["a"])  # the sequence was cancelled during its step
    assert (queue.current("a"), *queue.coming("a")[:-1]) != first[1:]
