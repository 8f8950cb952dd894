"""Claim: an answer names the model that answered at no charge."""

from uuid import uuid4

import pytest

from services.coordinator.messages import Delta, Generation
from services.privacy.mollifiers.shaping import SamplingOptions
from services.requests.answers import Answer, AnsweringBase, CompletionStyle


@pytest.mark.parametrize("base", ["public", "base"])
@pytest.mark.parametrize("first_free", [True, False])
def test_tokens_of_the_base_are_labelled(base: AnsweringBase, first_free: bool) -> None:
    generation = Generation(uuid4().hex, (1,), SamplingOptions(), 9)
    answer = Answer(CompletionStyle(None), "privmix", [generation], 1, base=base)
    answer.add([Delta(generation.id, "a ", (1,), public=first_free)])
    answer.add([Delta(generation.id, "b ", (2,), "stop", public=True)])
    assert answer.privmix is not None
    assert answer.privmix.model_dump() == {"answered_by": base if first_free else "mixed"}
