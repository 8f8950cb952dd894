"""Claim: an answer names the model that answered at no charge, and shows calls of tools as OpenAI does."""

from typing import Any
from uuid import uuid4

import pytest

from privmix.coordinator.messages import Delta, Generation
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.requests.answers import Answer, AnsweringBase, CompletionStyle, ToolStyle
from privmix.requests.errors import ApiError


@pytest.mark.parametrize("base", ["public", "base"])
@pytest.mark.parametrize("first_free", [True, False])
def test_tokens_of_the_base_are_labelled(base: AnsweringBase, first_free: bool) -> None:
    generation = Generation(uuid4().hex, (1,), SamplingOptions(), 9)
    answer = Answer(CompletionStyle(None), "privmix", [generation], 1, base=base)
    answer.add([Delta(generation.id, "a ", (1,), public=first_free)])
    answer.add([Delta(generation.id, "b ", (2,), "stop", public=True)])
    assert answer.privmix is not None
    assert answer.privmix.model_dump() == {"answered_by": base if first_free else "mixed"}


@pytest.mark.parametrize(("lost", "retries"), [(0, True), (4, False)])
def test_a_client_does_not_repeat_what_was_charged_and_lost(lost: int, retries: bool) -> None:
    generation = Generation(uuid4().hex, (1,), SamplingOptions(), 9)
    answer = Answer(CompletionStyle(None), "privmix", [generation], 1)
    with pytest.raises(ApiError) as failure:
        answer.add([Delta(generation.id, "", (), "error", retry_after=30, lost=lost)])
    assert ("x-should-retry" not in failure.value.headers) is retries
    assert answer.usage.completion_tokens == 0, "what was lost shows nowhere"


CALL = ('{"na', 'me": "book", "arguments": {"a": ', '"}{"', "}", "}")
TEXT = ("Bo", 'ok? {"name": "book", "argu', "ments")


@pytest.mark.parametrize(
    ("pieces", "must_call", "content", "arguments", "reason"),
    [
        (CALL, True, None, '{"a": "}{"}', "tool_calls"),
        (CALL, False, None, '{"a": "}{"}', "tool_calls"),
        (TEXT, False, "".join(TEXT), None, "stop"),
        (("",), False, "", None, "stop"),
    ],
    ids=["required", "chosen", "text", "nothing"],
)
def test_an_answer_with_tools_is_a_call_or_a_text(
    pieces: tuple[str, ...], must_call: bool, content: str | None, arguments: str | None, reason: str
) -> None:
    """The pieces are what has been sampled between two writes of a stream."""
    generation = Generation(uuid4().hex, (1,), SamplingOptions(), 9)
    answer = Answer(ToolStyle(["book", "end"], must_call), "privmix", [generation], 1)
    deltas = [Delta(generation.id, piece, (1,)) for piece in pieces[:-1]]
    chunks = []
    for delta in [*deltas, Delta(generation.id, pieces[-1], (1,), "stop")]:
        answer.add([delta])
        chunks += [chunk.model_dump()["choices"][0] for chunk in answer.chunks([delta])]
    (choice,) = answer.complete().model_dump()["choices"]
    calls: list[Any] = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert choice["message"]["content"] == content
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == (content or "")
    if arguments is None:
        assert calls == [] and "tool_calls" not in choice["message"]
    else:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "book", "arguments": arguments}
        assert [piece["function"].get("name") for piece in calls] == ["book", *[None] * (len(calls) - 1)]
        assert "".join(piece["function"]["arguments"] for piece in calls) == arguments
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == reason
