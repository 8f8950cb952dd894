"""Claim: the fault checker finds each planted fault, and accepts what the stated margin explains."""

from dataclasses import replace

import pytest

from tests.cluster.charges import Charges
from tests.cluster.clients import Chunk, Transcript
from tests.cluster.invariants import IN_FLIGHT, OPEN_LEASES, Margin, charge_violations, text_violations
from tests.counting import counted, counted_text

NOTHING = Charges(0)


def heard(start: int, tokens: int, wanted: int = 24, *, key: str = "ada") -> Transcript:
    """Returns the transcript of a correct stream with one chunk for each token; a short one broke."""
    chunks = [Chunk(counted_text([number]), place) for place, number in enumerate(counted(start, tokens), start=1)]
    return Transcript(start, wanted, tuple(chunks), "length" if tokens == wanted else None, key=key)


def with_words(transcript: Transcript, words: list[int]) -> Transcript:
    """Returns the transcript with another text, which the server counts as before."""
    return replace(transcript, chunks=(Chunk(counted_text(words), transcript.tokens),))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([1, 2, 4, 5], "skips to 4 at token 3, where 3 follows"),
        ([1, 2, 2, 3], "repeats 2 at token 3, where 3 follows"),
        ([1, 2, 3, 1, 2, 3], "repeats 1 at token 4"),
        ([1, 2, 3], "had 3 tokens when the server counted 4"),
        ([1, 2, 3], "ended after 3 tokens of 4 wanted"),
        ([1, 2, 3, 4, 5], "has 5 tokens of 4 wanted"),
        ([1, 98, 3, 4], "skips to 98"),
    ],
)
def test_lost_and_repeated_text_is_found(words: list[int], found: str) -> None:
    violations = text_violations([with_words(heard(0, 4, 4), words)])
    assert any(found in violation for violation in violations), violations


def test_the_margin_is_what_the_faults_explain_and_no_token_more() -> None:
    streams = [heard(0, 24), heard(97, 4)]
    received, missing, answers = 28, 20, 2
    for margin, most in (
        (Margin(), missing),
        (Margin(lost_leases=1, lease_tokens=16), missing + OPEN_LEASES * 16),
        (Margin(kills=2), missing + 2 * IN_FLIGHT * answers),
        (Margin(steps=1), missing + answers),
        (Margin(abandoned=1), missing + 48),
    ):
        assert charge_violations(NOTHING, Charges(received + most), streams, margin) == []
        (found,) = charge_violations(NOTHING, Charges(received + most + 1), streams, margin)
        assert f"with a margin of {most}" in found


@pytest.mark.parametrize(
    ("spent", "found"),
    [
        (27, "the key ada charged 27 tokens, and clients received 28"),
        (49, "the key ada charged 49 tokens for 28 received, with a margin of 20"),
    ],
)
def test_a_key_that_pays_too_little_or_too_much_is_found(spent: int, found: str) -> None:
    streams = [heard(0, 24), heard(97, 4), heard(3, 24, key="bob")]
    by_key = {"ada": spent, "bob": 24}
    violations = charge_violations(NOTHING, Charges(52, by_key=by_key), streams)
    assert violations == [found]


def test_tokens_beyond_the_budget_or_from_unknown_parts_are_found() -> None:
    beyond = charge_violations(NOTHING, Charges(24, epsilon=8.1, promised=8.0), [heard(0, 24)])
    assert beyond == ["tokens left after the budget's end: epsilon is 8.1 of 8.0"]
    foreign = charge_violations(NOTHING, Charges(24, frozenset({4})), [heard(0, 24)], parts=[2])
    assert foreign == ["tokens were drawn from [4] parts, of [2]"]
