"""Claim: an answer names the model that answered at no charge."""

from uuid import uuid4

import pytest

from privmix.coordinator.messages import Delta, Generation
from privmix.gateway.answers import Answer, AnsweringBase, CompletionStyle
from privmix.gateway.errors import ApiError
from privmix.privacy.mollifiers.shaping import SamplingOptions


@pytest.mark.parametrize("base", ["public", "base"])
@pytest.mark.parametrize("first_free", [True, False])
def test_tokens_of_the_base_are_labelled(base: AnsweringBase, first_free: bool) -> None:
    generation = Generation(uuid4().hex, (1,), SamplingOptions(), 9)
    answer = Answer(CompletionStyle(None), "privmix", [generation], 1, base=base)
    answer.add([Delta(generation.id, "a ", (1,), public=first_free)])
    answer.add([Delta(generation.id, "b ", (2,), "stop", public=True)])
    assert answer.privmix == {"answered_by": base if first_free else "mixed"}


@pytest.mark.parametrize(("lost", "retries"), [(0, True), (4, False)])
def test_a_client_does_not_repeat_what_was_charged_and_lost(lost: int, retries: bool) -> None:
    generation = Generation(uuid4().hex, (1,), SamplingOptions(), 9)
    answer = Answer(CompletionStyle(None), "privmix", [generation], 1)
    with pytest.raises(ApiError) as failure:
        answer.add([Delta(generation.id, "", (), "error", retry_after=30, lost=lost)])
    assert ("x-should-retry" not in failure.value.headers) is retries
    assert answer.tokens == 0, "what was lost shows nowhere"
