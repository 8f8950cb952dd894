"""Claim: the longest copied span of a text is exact, and secrets are counted apart from what chance finds."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privmix.foundation.errors import InputError
from privmix.laboratory.utility.copies import (
    PlantedSecret,
    Secrets,
    find_secrets,
    longest_spans,
    read_canaries,
)

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=5)


def brute_force(text: Sequence[int], private: Sequence[Sequence[int]]) -> int:
    def spans(tokens: Sequence[int]) -> set[tuple[int, ...]]:
        ends = range(len(tokens) + 1)
        return {tuple(tokens[start:end]) for end in ends for start in range(end)}

    return max((len(span) for other in private for span in spans(text) & spans(other)), default=0)


@given(TEXTS, TEXTS)
def test_the_longest_spans_are_those_of_all_spans(texts: list[list[int]], private: list[list[int]]) -> None:
    assert longest_spans(texts, private).tolist() == [brute_force(text, private) for text in texts]


def test_a_span_does_not_cross_from_one_text_to_the_next() -> None:
    assert longest_spans([[1, 2, 3, 4]], [[1, 2], [3, 4]]).tolist() == [2]
    assert longest_spans([[1, 2], [3, 4]], [[1, 2, 3, 4]]).tolist() == [2, 2]


def test_a_copied_text_is_as_long_as_itself() -> None:
    chance = np.random.default_rng(0)
    private = [chance.integers(49_152, size=200).tolist() for _ in range(50)]
    assert longest_spans([private[7], private[8][40:90]], private).tolist() == [200, 50]


def test_secrets_of_the_private_text_are_counted_apart_from_others() -> None:
    canaries = [PlantedSecret("HC-111111", True), PlantedSecret("HC-222222", True), PlantedSecret("HC-333333", False)]
    assert find_secrets(["my number is HC-111111.", "HC-333333"], canaries) == Secrets(1, 2, 1, 1)


def test_canaries_of_the_demo_corpus_and_of_audits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "canaries.jsonl"
    rows = [{"code": "a", "split": "train"}, {"code": "b", "split": "heldout"}, {"secret": "c", "included": False}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_canaries(path) == (PlantedSecret("a", True), PlantedSecret("b", False), PlantedSecret("c", False))
    path.write_text('{"code": "a"}\n["heliotrope"]\n')
    with pytest.raises(InputError, match="line 2: must be an object with a secret or a code") as refused:
        read_canaries(path)
    assert "heliotrope" not in str(refused.value)
