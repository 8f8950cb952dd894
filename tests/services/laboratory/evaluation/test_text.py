"""Claim: each block has the text of one user, and runs read their stated positions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from privmix.foundation.errors import InputError
from privmix.laboratory.evaluation.text import EvaluationText, held_out_text
from privmix.training.corpus import Document

DOCUMENTS = [
    Document(user, f"{user} says line {number} of what there is to say, and means it.")
    for number in range(6)
    for user in ("ann", "bob", "cat")
]


@pytest.fixture(scope="module")
def tokenizer(public_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(public_model)


def text(tokenizer: Any, tokens: int, runs: int, context: int = 32, seed: int = 0) -> EvaluationText:
    return held_out_text(DOCUMENTS, tokenizer, context=context, tokens=tokens, runs=runs, seed=seed)


def test_blocks_hold_one_users_documents_in_their_order(tokenizer: Any) -> None:
    everything = text(tokenizer, 10_000, 1, context=1000)
    decoded = sorted(tokenizer.decode(block.tokens) for block in everything.blocks)
    assert decoded == [
        "".join(document.text + tokenizer.eos_token for document in DOCUMENTS if document.user == user)
        for user in ("ann", "bob", "cat")
    ]


def test_every_token_except_the_first_of_a_block_is_evaluated_once(tokenizer: Any) -> None:
    everything = text(tokenizer, 10_000, 1)
    of_text = sum(len(tokenizer(document.text)["input_ids"]) for document in DOCUMENTS)
    first = sum(block.tokens[0] != tokenizer.eos_token_id for block in everything.blocks)
    assert everything.positions == of_text - first
    assert tokenizer.eos_token_id not in everything.true_tokens
    assert all(len(block.tokens) <= 32 for block in everything.blocks)
    assert sorted(everything.runs[0].tolist()) == list(range(everything.positions))


def test_runs_share_no_position_if_the_text_suffices(tokenizer: Any) -> None:
    apart = text(tokenizer, 50, 3)
    assert apart.apart
    assert [len(run) for run in apart.runs] == [50, 50, 50]
    assert len(np.unique(np.concatenate(apart.runs))) == 150
    together = text(tokenizer, 200, 3)
    assert not together.apart
    assert all(len(np.unique(run)) == len(run) for run in together.runs)


def test_only_the_needed_text_is_read(tokenizer: Any) -> None:
    few, all_ = text(tokenizer, 20, 2), text(tokenizer, 10_000, 1)
    assert 40 <= few.positions < 40 + 32
    assert few.digest != all_.digest
    assert few.digest == text(tokenizer, 20, 2).digest != text(tokenizer, 20, 2, seed=1).digest


def test_an_empty_text_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="no document of at least two tokens"):
        held_out_text([Document("ann", "I")], tokenizer, context=8, tokens=4, runs=1)
