"""Claim: an embedding is the mean of a text's hidden states, whatever texts share its batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from privmix.laboratory.utility.embedding import Embedder

TEXTS = ["Thank you for your call.", "", "The ferry to the island leaves at nine, and waits for nobody at all.", "a"]


def test_an_embedding_is_the_mean_over_the_tokens(tiny: Path) -> None:
    done: list[float] = []
    rows = Embedder(tiny).embed(TEXTS * 10, done.append)
    assert done == sorted(done)
    assert done[-1] == 1
    tokenizer, network = AutoTokenizer.from_pretrained(tiny), AutoModel.from_pretrained(tiny, dtype=torch.float32)
    for index, text in enumerate(TEXTS):
        tokens = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
        with torch.inference_mode():
            states = network(input_ids=tokens).last_hidden_state[0].double().numpy()
        expected = states[1:].mean(axis=0) if text else states[0]
        assert rows[index] == pytest.approx(expected, abs=1e-4)
        assert np.abs(rows[index :: len(TEXTS)] - expected).max() < 1e-4
