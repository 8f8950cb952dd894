"""Claim: the streamed text of a client equals the decoded answer, cut at its stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from privmix.coordinator.text import Detokenizer, TextStream
from tests.support.texts import TEXTS, deltas, ids, smollm, smollm_tokenizer, streamed, word_start, word_start_tokenizer


def decoded(detokenizer: Detokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Decodes all tokens at once and returns the answer up to the first end token."""
    end = next((place for place, token in enumerate(answer) if token in detokenizer.ends), len(answer))
    before = detokenizer.decode(prompt)
    whole = detokenizer.decode([*prompt, *answer[:end]])
    assert whole.startswith(before)
    text = whole[len(before) :]
    return text[: max(0, len(text) - detokenizer.partial_length([*prompt, *answer[:end]]))]


def cut(text: str, stop: Sequence[str]) -> str:
    """Reads the text character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [len(string) for string in stop if text[:end].endswith(string)]
        if complete:
            return text[: end - max(complete)]
    return text


@pytest.mark.parametrize("text", TEXTS)
def test_text_arrives_whole(text: str) -> None:
    prompt = ids("Say it:")
    assert streamed(smollm(), prompt, ids(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_word_start_tokenizer_keeps_the_space_after_the_prompt(text: str) -> None:
    tokenizer = word_start_tokenizer()
    prompt = ids("the clinic", tokenizer)
    answer = ids(text, tokenizer)
    assert streamed(word_start(), prompt, answer) == " " + text


def test_a_special_token_between_words_costs_no_space() -> None:
    tokenizer = word_start_tokenizer()
    special = tokenizer.token_to_id("<s>")
    assert special is not None
    answer = [*ids("opens", tokenizer), special, *ids("at nine", tokenizer)]
    assert streamed(word_start(), ids("the clinic", tokenizer), answer) == " opens at nine"


def test_characters_arrive_whole() -> None:
    """No delta contains an incomplete character, although tokens do."""
    answer = ids("".join(TEXTS[2:4]))
    assert any("�" in smollm().decode([token]) for token in answer)
    assert not any("�" in delta for delta in deltas(smollm(), ids("x"), answer))


def test_text_is_not_held_without_need() -> None:
    answer = ids("The clinic opens at nine")
    assert deltas(smollm(), ids("x"), answer, ("zebra",)) == [*(smollm().decode([token]) for token in answer), ""]


def test_a_character_begun_in_the_prompt_belongs_to_the_answer() -> None:
    tokens = ids("\U0001f9ff")
    assert len(tokens) > 1
    assert streamed(smollm(), tokens[:1], [*tokens[1:], *ids(" ok")]) == "\U0001f9ff ok"


CHARACTERS = ("é", "東", "ࠀ", "퟿", "\U0001f9ff", "\U00010000", "\U0010ffff", "�")


@pytest.mark.parametrize("character", CHARACTERS)
@pytest.mark.parametrize("word_starts", [False, True])
def test_a_part_of_a_character_at_the_end_is_held_back(character: str, word_starts: bool) -> None:
    detokenizer = word_start() if word_starts else smollm()
    tokenizer = word_start_tokenizer() if word_starts else smollm_tokenizer()
    single = [byte_token(tokenizer, byte) for byte in character.encode()]
    prompt, before = ids("at nine", tokenizer), ids("at", tokenizer)
    for length in range(len(single)):
        tokens = [*before, *single[:length]]
        assert bool(detokenizer.partial_length(tokens)) == (length > 0)
        assert streamed(detokenizer, prompt, tokens) == streamed(detokenizer, prompt, before)
    assert not detokenizer.partial_length(single)
    assert streamed(detokenizer, prompt, [*before, *single]).endswith(character)
    invalid = [*before, single[0], *before]
    assert "�" in streamed(detokenizer, prompt, invalid), "bytes that are no character stay visible in the middle"


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    token = tokenizer.token_to_id(f"<0x{byte:02X}>")
    token = tokenizer.token_to_id(bytes_to_unicode()[byte]) if token is None else token
    assert token is not None
    return token


def test_an_end_token_stops_and_flushes() -> None:
    stream = TextStream(smollm(), ids("x"), ("stop",))
    (end, *_) = smollm().ends
    held = [stream.push(token) for token in ids("now st")]
    assert "".join(held) == "now "
    assert stream.push(end) == "st"
    assert stream.stopped
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", (" two",), "one"),
        ("one two three", ("o thr",), "one tw"),
        ("one two three", ("three",), "one two "),
        ("one two three", ("one",), ""),
        ("one two three", ("four", "three f"), "one two three"),
        ("one two three", ("three", "two"), "one "),
        ("aaab", ("aab",), "a"),
        ("abcabd", ("abd", "abcabx"), "abc"),
        ("abc", ("b", "abc"), "a"),
        ("abc", ("c", "bc"), "a"),
        ("line\n\nnext", ("\n\n",), "line"),
        ("smile \U0001f600 more", ("\U0001f600",), "smile "),
        ("東京は日本の首都です", ("日本",), "東京は"),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], expected: str) -> None:
    assert streamed(smollm(), ids("x"), ids(text), stop) == expected


def test_stop_strings_do_not_reach_back_into_the_prompt() -> None:
    assert streamed(smollm(), ids("User"), ids(": hi"), ("User:",)) == ": hi"


def test_every_step_decodes_a_few_tokens_only() -> None:
    class Measured(Detokenizer):
        longest = 0

        def decode(self, tokens: Sequence[int]) -> str:
            self.longest = max(self.longest, len(tokens))
            return super().decode(tokens)

    measured = Measured(smollm_tokenizer(), smollm().ends)
    text = " ".join(TEXTS[:5]) * 20
    assert streamed(measured, ids("x" * 500), ids(text)) == text
    assert measured.longest <= 24


# Byte tokens create invalid characters, which ordinary text does not contain.
pieces_of_characters = st.deferred(lambda: st.sampled_from(ids("\U0001f600東é—")))
any_tokens = st.lists(st.integers(0, 49_151) | st.integers(17, 300) | pieces_of_characters, max_size=40)
any_text = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("ab \n\U0001f600é東"), max_size=40)


@st.composite
def text_and_stops(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    text = draw(any_text)
    pieces = [st.text(st.sampled_from("ab \n"), min_size=1, max_size=3)]
    if text:
        places = st.integers(0, len(text) - 1)
        pieces.append(st.tuples(places, st.integers(1, 6)).map(lambda place: text[place[0] : sum(place)]))
    return text, tuple(draw(st.lists(st.one_of(pieces), max_size=4)))


@given(any_text, any_tokens)
def test_any_tokens_stream_to_their_decoding(prompt: str, answer: list[int]) -> None:
    assert streamed(smollm(), ids(prompt), answer) == decoded(smollm(), ids(prompt), answer)


@given(any_tokens, st.lists(st.text(st.sampled_from("ab e�"), min_size=1, max_size=3), max_size=4))
def test_any_tokens_are_cut_at_any_stop(answer: list[int], stop: list[str]) -> None:
    assert streamed(smollm(), ids("x"), answer, stop) == cut(decoded(smollm(), ids("x"), answer), stop)


@given(text_and_stops())
def test_any_text_is_cut_at_its_stop(case: tuple[str, tuple[str, ...]]) -> None:
    text, stop = case
    assert streamed(smollm(), ids("x"), ids(text), stop) == cut(decoded(smollm(), ids("x"), ids(text)), stop)


@given(text_and_stops())
def test_any_text_of_a_word_start_tokenizer_is_cut_at_its_stop(case: tuple[str, tuple[str, ...]]) -> None:
    text, stop = case
    tokenizer = word_start_tokenizer()
    prompt, answer = ids("the clinic", tokenizer), ids(text, tokenizer)
    assert streamed(word_start(), prompt, answer, stop) == cut(decoded(word_start(), prompt, answer), stop)
