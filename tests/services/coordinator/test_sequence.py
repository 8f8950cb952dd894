"""Claim: an answer that another coordinator continues equals the answer of a single coordinator."""

from collections.abc import Sequence as Tokens
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privmix.coordinator.messages import Delta, Generation
from privmix.coordinator.sequence import LiveSequence
from privmix.coordinator.text import Detokenizer
from privmix.privacy.mollifiers.shaping import SamplingOptions
from tests.support.texts import TEXTS, ids, smollm, word_start, word_start_tokenizer

STOPS = ((), ("nine, and",), ("\U0001f469‍\U0001f467", "closes at five."), ("首都", "�"))


def deltas(generation: Generation, detokenizer: Detokenizer, tokens: Tokens[int]) -> list[Delta]:
    """Returns the deltas that the client receives for these tokens, until the answer ends."""
    sequence = LiveSequence("channel", generation, detokenizer)
    return [sequence.accept(token) for token in tokens if sequence.finish_reason is None]


def check_every_handover(generation: Generation, detokenizer: Detokenizer, tokens: Tokens[int]) -> None:
    whole = deltas(generation, detokenizer, tokens)
    for seam in range(1, len(whole)):
        released = tuple(token for delta in whole[:seam] for token in delta.token_ids)
        assert deltas(replace(generation, released=released), detokenizer, tokens[seam:]) == whole[seam:]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_and_end_do_not_depend_on_a_handover(text: str, stop: tuple[str, ...]) -> None:
    """The texts include characters of several tokens, stop strings and spaces."""
    tokens = ids(text)
    for length in (len(tokens), len(tokens) - 1):
        check_every_handover(Generation("g", tuple(ids("Say:")), SamplingOptions(), length, stop), smollm(), tokens)


@given(st.text("the clnopsaé東 ", min_size=1, max_size=20), st.sampled_from(((), ("e c",), ("clo", "se"))))
def test_a_word_start_tokenizer_keeps_its_spaces_at_a_handover(text: str, stop: tuple[str, ...]) -> None:
    tokenizer = word_start_tokenizer()
    tokens = ids(text, tokenizer)
    prompt = tuple(ids("the clinic", tokenizer))
    check_every_handover(Generation("g", prompt, SamplingOptions(), len(tokens), stop), word_start(), tokens)


def test_an_end_token_after_a_handover_ends_the_answer() -> None:
    end = next(iter(smollm().ends))
    generation = Generation("g", (1, 2), SamplingOptions(), 10, released=tuple(ids("at five")))
    (last,) = deltas(generation, smollm(), [end])
    assert last == Delta("g", "", (end,), "stop")
