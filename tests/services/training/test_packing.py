"""Claim: packing puts every token of a part into exactly one block, and keeps the order of documents."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from privmix.foundation.errors import InputError
from privmix.training.corpus import Document
from privmix.training.packing import IGNORED, even_size, pack, tokenize
from privmix.training.partition import Partition, PartShare, half_of, part_of
from tests.support.training import PARTS, SALT


@given(st.lists(st.integers(0, 49151), max_size=300), st.integers(2, 64))
def test_blocks_hold_every_token_once(tokens: list[int], size: int) -> None:
    inputs, labels = pack(np.array(tokens, dtype=np.int32), size)
    assert inputs.shape == labels.shape == (-(-len(tokens) // size), size)
    assert labels[labels != IGNORED].tolist() == tokens
    assert inputs[labels != IGNORED].tolist() == tokens


@given(st.integers(1, 300), st.integers(2, 64))
def test_even_blocks_are_few_and_have_little_padding(tokens: int, largest: int) -> None:
    size = even_size(tokens, largest)
    inputs, labels = pack(np.zeros(tokens, dtype=np.int32), size)
    assert size <= largest
    assert len(inputs) == -(-tokens // largest)
    assert (labels == IGNORED).sum() < len(inputs)


def test_documents_of_a_part_are_ended_and_in_order(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    documents = [Document("ann", "first"), Document("bob", "other"), Document("ann", "second")]
    streams = tokenize(documents, tokenizer, Partition(SALT, 1))
    assert tokenizer.decode(streams[PartShare(0)]) == "first<|im_end|>other<|im_end|>second<|im_end|>"


def test_an_end_token_that_a_person_typed_is_text(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    documents = [Document("ann", "one<|im_end|>two<|im_end|>"), Document("bob", "three")]
    tokens = tokenize(documents, tokenizer, Partition(SALT, 1))[PartShare(0)].tolist()
    assert tokenizer.decode(tokens) == "one<|im_end|>two<|im_end|><|im_end|>three<|im_end|>"
    assert tokens.count(tokenizer.eos_token_id) == len(documents)


def test_blocks_of_the_whole_text_are_users_and_a_change_within_one_changes_no_other(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    words = [f"{number:03d}" for number in range(100)]
    whole = tokenize([Document("", word) for word in words], tokenizer, Partition(SALT, 1))[PartShare(0)]
    partition = Partition(SALT, PARTS)
    before = tokenize([Document("", word) for word in words], tokenizer, partition, 16)
    blocks = [block.tolist() for share in before.values() for block in np.split(share, range(16, len(share), 16))]
    assert sorted(block for block in blocks if block) == sorted(
        whole[start : start + 16].tolist() for start in range(0, len(whole), 16)
    )
    words[50] = "999"
    after = tokenize([Document("", word) for word in words], tokenizer, partition, 16)
    assert sum(not np.array_equal(before[share], after[share]) for share in partition.shares) == 1


def test_a_new_user_changes_only_one_part_and_one_half(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    # More documents than one batch of the tokenizer, to show that batches do not matter.
    documents = [Document(f"user-{number % 300}", f"text {number}") for number in range(1500)]
    newcomer = Document("newcomer", "a text much longer than all of the others " * 9)
    partition = Partition(SALT, PARTS, halves=True)
    before = tokenize(documents, tokenizer, partition)
    for place in (0, 700, 1500):
        after = tokenize([*documents[:place], newcomer, *documents[place:]], tokenizer, partition)
        changed = [share for share in partition.shares if not np.array_equal(before[share], after[share])]
        part = part_of("newcomer", SALT, PARTS)
        assert changed == [PartShare(part), PartShare(part, half_of("newcomer", SALT))]


def test_a_part_without_users_has_no_tokens(base: Path) -> None:
    streams = tokenize([], AutoTokenizer.from_pretrained(base), Partition(SALT, PARTS, halves=True))
    assert [len(stream) for stream in streams.values()] == [0] * 3 * PARTS


def test_tokenizer_without_an_end(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="eos_token"):
        tokenize([], tokenizer, Partition(SALT, PARTS))
