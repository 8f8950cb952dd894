"""Claim: the text of a prompt and that of its answer are one text, wherever the prompt ends."""

import pytest

from services.requests.models import Prompts
from services.training.public_model import resolve
from tests.services.coordinator.test_text import ids, smollm, streamed


@pytest.mark.parametrize("text", ["at nine", "東京は日本の首都です", "say 🧿 ok", "a � of its own"])
def test_an_echo_and_its_answer_are_one_text(text: str) -> None:
    prompts, tokens = Prompts.load(resolve()), ids(text)
    for cut in range(1, len(tokens)):
        assert prompts.text(tokens[:cut]) + streamed(smollm(), tokens[:cut], tokens[cut:]) == text
    assert prompts.text(text) == text
