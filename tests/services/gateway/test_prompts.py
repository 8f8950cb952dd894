"""Claim: a long prompt blocks no other request, and one that is much too long is refused before it is tokenised."""

import asyncio
import threading
from typing import Any

import pytest
from transformers import AutoTokenizer

from privmix.foundation.turns import Turns
from privmix.gateway.errors import ApiError
from privmix.gateway.schema import Message
from privmix.gateway.served_model import INLINE_CHARACTERS, LIKELY_CHARACTERS, SLACK_TOKENS, THREADS, PromptTokenizer
from privmix.structure.compiler import Compiler
from privmix.training.public_model import resolve
from tests.support.structure import words
from tests.support.texts import ids, smollm, streamed

pytestmark = pytest.mark.anyio

LIMIT = 1000


@pytest.mark.parametrize("text", ["at nine", "東京は日本の首都です", "say 🧿 ok", "a � of its own"])
async def test_an_echo_and_its_answer_are_one_text(prompts: PromptTokenizer, text: str) -> None:
    tokens = ids(text)
    for cut in range(1, len(tokens)):
        assert await prompts.text(tokens[:cut]) + streamed(smollm(), tokens[:cut], tokens[cut:]) == text
    assert await prompts.text(text) == text


class Watched:
    """Passes calls to the tokenizer and records the sizes of what it gets, with the threads that call it."""

    def __init__(self, rust: Any) -> None:
        self._rust = rust
        self.calls: list[tuple[int, bool]] = []

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._rust, name)
        if name not in ("encode_batch_fast", "encode_batch", "decode_batch"):
            return own

        def called(batch: list[Any], **options: Any) -> Any:
            self.calls.append((len(batch[0]), threading.current_thread() is threading.main_thread()))
            return own(batch, **options)

        return called


@pytest.fixture(scope="module")
def loaded() -> Any:
    return AutoTokenizer.from_pretrained(resolve())


@pytest.fixture
def prompts(loaded: Any) -> PromptTokenizer:
    prompts = PromptTokenizer(loaded, Compiler(words))
    watched: Any = Watched(loaded.backend_tokenizer)
    prompts._rust = prompts._people._special = watched
    return prompts


def calls(prompts: PromptTokenizer) -> list[tuple[int, bool]]:
    watched: Watched = prompts._rust
    return watched.calls


def user(content: str) -> Message:
    return Message(role="user", content=content)


async def refused(prompts: PromptTokenizer, text: str) -> None:
    for field, asking in (
        ("prompt", prompts.tokens([text], LIMIT)),
        ("messages", prompts.chat_tokens([user(text)], LIMIT)),
        ("prompt", prompts.encode(text, LIMIT, "prompt", add_special_tokens=True)),
    ):
        with pytest.raises(ApiError) as refusal:
            await asking
        assert (refusal.value.status, refusal.value.code, refusal.value.param) == (
            400,
            "context_length_exceeded",
            field,
        )


async def test_a_long_text_is_read_and_written_in_a_thread(prompts: PromptTokenizer, loaded: Any) -> None:
    text = "Good morning. " * 200
    (tokens,) = await prompts.tokens([text], LIMIT)
    assert tokens == tuple(loaded.backend_tokenizer.encode(text).ids)
    assert calls(prompts) == [(len(text), False)]
    await prompts.chat_tokens([user(text)], LIMIT)
    await prompts.chat_tokens([user("")] * 100, LIMIT)
    assert await prompts.text([504] * (INLINE_CHARACTERS + 1)) == loaded.backend_tokenizer.decode(
        [504] * (INLINE_CHARACTERS + 1)
    )
    assert not any(main for _, main in calls(prompts))
    await prompts.tokens(["Good morning"], LIMIT)
    assert calls(prompts)[-1] == (12, True), "a short one waits for no thread"


async def test_a_text_that_is_much_too_long_is_read_at_its_beginning_only(prompts: PromptTokenizer) -> None:
    await refused(prompts, "7" * (5 * LIKELY_CHARACTERS * LIMIT))
    assert {size for size, _ in calls(prompts)} == {LIKELY_CHARACTERS * LIMIT}
    calls(prompts).clear()
    await refused(prompts, "a" * (prompts._longest * LIMIT + 1))
    assert calls(prompts) == [], "its bytes suffice"
    with pytest.raises(ApiError, match="tokens"):
        await prompts.tokens([[2**70] * (LIMIT + 1)], LIMIT)


async def test_a_text_of_long_tokens_is_read_to_its_end(prompts: PromptTokenizer, loaded: Any) -> None:
    longest = max((piece for piece in loaded.get_vocab() if set(piece) == {"Ġ"}), key=len)
    text = " " * len(longest) * (LIMIT // 2)
    assert len(text) > LIKELY_CHARACTERS * LIMIT
    (tokens,) = await prompts.tokens([text], LIMIT)
    assert len(tokens) <= LIMIT
    for beginning in (text[: LIKELY_CHARACTERS * LIMIT], "7" * LIMIT):
        (some,) = await prompts.tokens([beginning], LIMIT)
        assert len(some) <= LIMIT + SLACK_TOKENS
    await refused(prompts, "7" * (LIMIT + 1))


async def test_a_client_waits_for_its_own_turns() -> None:
    turns, running, most = Turns(THREADS), set[str](), 0
    free = asyncio.Event()

    async def work(client: str) -> None:
        nonlocal most
        async with turns.turn(client):
            assert client not in running, "one turn at a time for each"
            running.add(client)
            most = max(most, len(running))
            await (free.wait() if client == "greedy" else asyncio.sleep(0))
            running.remove(client)

    greedy = [asyncio.create_task(work("greedy")) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.gather(*(work(client) for client in "abcabc"))
    assert running == {"greedy"}, "the others did not wait for it"
    free.set()
    await asyncio.gather(*greedy)
    assert most == THREADS
    assert not turns._own, "it remembers nobody"
