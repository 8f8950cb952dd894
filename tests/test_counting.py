"""Claim: the counting model and each of its adapters count, so that every other text is a fault of the service."""

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.counting import NUMBERS, counted, counted_text, write_counting_model
from tests.ensembles import write_adapters


def test_the_next_number_is_certain_for_the_model_and_its_adapters(tmp_path: Path) -> None:
    model = write_counting_model(tmp_path / "model")
    adapters = write_adapters(tmp_path / "parts", ["part-000", "part-001"], model)
    numbers = torch.arange(NUMBERS)
    contexts = torch.stack([numbers, (numbers + 1) % NUMBERS], dim=1)
    for adapter in (None, *adapters.values()):
        counting = AutoModelForCausalLM.from_pretrained(model)
        if adapter is not None:
            counting = PeftModel.from_pretrained(counting, adapter)
        with torch.inference_mode():
            rows = counting(contexts).logits[:, -1].softmax(-1)
        assert (rows[numbers, (numbers + 2) % NUMBERS] > 1 - 1e-6).all()


def test_the_text_of_an_answer_has_one_word_for_each_token(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_counting_model(tmp_path / "model"))
    answer = counted(NUMBERS - 3, 5)
    assert answer == [NUMBERS - 2, NUMBERS - 1, 0, 1, 2]
    assert tokenizer(counted_text(answer)).input_ids == answer
