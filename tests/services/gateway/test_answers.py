"""Claim: an answer has OpenAI's form, whole and streamed, and names the model that answered at no charge."""

from uuid import uuid4

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from privmix.coordinator.messages import Delta, Generation
from privmix.gateway.answers import Answer, ChatStyle, CompletionStyle
from privmix.gateway.errors import ApiError
from privmix.privacy.mollifiers.shaping import SamplingOptions


@pytest.mark.parametrize("base", ["public", "base"])
@pytest.mark.parametrize("first_free", [True, False])
def test_tokens_of_the_base_are_labelled(base: str, first_free: bool) -> None:
    generation = Generation(uuid4().hex, (1,), SamplingOptions(), 9)
    answer = Answer(CompletionStyle(), "privmix", [generation], 1, base=base)
    first, last = (
        Delta(generation.id, "a ", (1,), public=first_free),
        Delta(generation.id, "b ", (2,), "stop", public=True),
    )
    answer.add([first])
    assert [chunk.get("privmix") for chunk in answer.chunks([first])] == [{"answered_by": base} if first_free else None]
    answer.add([last])
    assert answer.privmix == {"answered_by": base if first_free else "mixed"}


@pytest.mark.parametrize(("lost", "retries"), [(0, True), (4, False)])
def test_a_client_does_not_repeat_what_was_charged_and_lost(lost: int, retries: bool) -> None:
    generation = Generation(uuid4().hex, (1,), SamplingOptions(), 9)
    answer = Answer(CompletionStyle(), "privmix", [generation], 1)
    with pytest.raises(ApiError) as failure:
        answer.add([Delta(generation.id, "", (), "error", retry_after=30, lost=lost)])
    assert ("x-should-retry" not in failure.value.headers) is retries
    assert answer.tokens == 0, "what was lost shows nowhere"


def test_bodies_have_the_types_of_openai() -> None:
    generations = [Generation(uuid4().hex, (1,), SamplingOptions(), 9) for _ in range(2)]
    deltas = [Delta(generations[0].id, "a", (1,)), Delta(generations[1].id, "b", (2,), "stop")]
    last = Delta(generations[0].id, "c", (3,), "length")
    chat = Answer(ChatStyle(), "privmix", generations, 1)
    echo = Answer(CompletionStyle(["x ", ""]), "privmix", generations, 1)
    chat.add([*deltas, last])
    echo.add([*deltas, last])
    chunks = [*chat.opening(), *chat.chunks([*deltas, last], with_usage=True), chat.closing()]
    read = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
    assert [chunk.choices[0].delta.content for chunk in read[:-1]] == ["", "", "ac", "b"]
    assert [chunk.usage and chunk.usage.completion_tokens for chunk in read] == [None, None, 3, 3, 3]
    whole = ChatCompletion.model_validate(chat.complete(), strict=True)
    assert [(choice.message.content, choice.finish_reason) for choice in whole.choices] == [
        ("ac", "length"),
        ("b", "stop"),
    ]
    assert [choice.text for choice in Completion.model_validate(echo.complete(), strict=True).choices] == ["x ac", "b"]
    assert [chunk["choices"][0]["text"] for chunk in (*echo.opening(), *echo.chunks([last]))] == ["x ", "c"]
