"""Claim: each measure of quality follows its definition."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from privmix.laboratory.generation import quality


def test_distinct_n_compares_equal_numbers_of_words() -> None:
    variety = quality.variety({"a": ["a b a b"], "b": ["x y z", "w x y z w"]})
    assert (variety["a"].words, variety["b"].words) == (4, 4)
    assert variety["a"].distinct == {1: 2 / 4, 2: 2 / 3, 3: 2 / 2}
    assert variety["b"].distinct == {1: 1.0, 2: 1.0, 3: 1.0}


def test_lengths_are_in_words() -> None:
    assert quality.lengths(["one two three", "one"]).mean == 2


def test_perplexity_equals_the_models(tiny: Path) -> None:
    text = "Thank you for your call."
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tiny),
        AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32),
    )
    tokens = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
    with torch.inference_mode():
        loss = float(model(input_ids=tokens, labels=tokens).loss)
    reader = quality.PerplexityModel(tiny, "float32")
    assert reader.perplexity([text]) == pytest.approx(math.exp(loss), rel=1e-4)
    assert reader.perplexity([""]) == math.inf


def test_the_divergence_area_of_equal_histograms_is_one_and_of_disjoint_ones_almost_none() -> None:
    p = np.array([0.5, 0.3, 0.2])
    assert quality.divergence_area(p, p) == pytest.approx(1)
    assert quality.divergence_area(np.array([1.0, 0.0]), np.array([0.0, 1.0])) < 0.01
    near, far = np.array([0.45, 0.35, 0.2]), np.array([0.1, 0.1, 0.8])
    assert quality.divergence_area(p, far) < quality.divergence_area(p, near) < 1
    assert quality.divergence_area(p, far) == pytest.approx(quality.divergence_area(far, p))


def test_mauve_distinguishes_distributions() -> None:
    chance = np.random.default_rng(0)
    real, same = chance.normal(size=(200, 8)), chance.normal(size=(200, 8))
    other = chance.normal(size=(200, 8)) * 0.2 + 3
    assert quality.mauve(same, real, 200) > 0.8
    assert quality.mauve(other, real, 200) < 0.2


def test_mauve_near_zero_hardly_depends_on_two_texts_more() -> None:
    chance = np.random.default_rng(1)
    real, ours = chance.normal(size=(240, 24)), chance.normal(size=(240, 24)) + 0.6
    scores = [quality.mauve(ours, real, count) for count in (156, 158, 160, 162)]
    assert max(scores) < 1.3 * min(scores), "of single draws, the largest is 1.6 times the smallest"


def test_sets_of_different_sizes_are_compared_with_equally_many_texts() -> None:
    chance = np.random.default_rng(0)
    real, few, many = (chance.normal(size=(count, 8)) for count in (400, 120, 300))
    alone = quality.Likeness.of({"few": few, "too few": few[:99]}, real)
    assert (alone.texts, set(alone.scores)) == (120, {"few"})
    beside = quality.Likeness.of({"many": many, "few": few}, real)
    assert beside.texts == 120
    assert beside.scores["few"] == alone.scores["few"]
    assert beside.scores["many"] == quality.mauve(many, real, 120) != quality.mauve(many, real, 300)
    assert quality.Likeness.of({"few": few}, real[:99]) == quality.Likeness(None, {})


def test_utility_is_the_accuracy_on_real_text() -> None:
    train = [("my knee hurts badly", "urgent"), ("a new appointment please", "routine")] * 5
    test = [("the knee hurts", "urgent"), ("an appointment please", "routine"), ("knee", "urgent")]
    utility = quality.utility(train, test)
    assert utility == quality.Utility(1.0, trained_on=10, tested_on=3, majority=2 / 3)
    swapped = [(text, "routine" if label == "urgent" else "urgent") for text, label in train]
    assert (wrong := quality.utility(swapped, test)) is not None
    assert wrong.accuracy == 0
    assert quality.utility(train[:1], test) is None


def test_overlap_finds_copies() -> None:
    real = ["one two three four five six seven eight nine ten", "something else entirely"]
    copy = quality.overlap(["well one two three four five six seven eight"], real)
    fresh = quality.overlap(["one two three and then other words follow here"], real)
    assert (copy.copied, fresh.copied) == (1.0, 0.0)
    assert copy.nearest_mean > fresh.nearest_mean
    assert quality.overlap([real[0]], real).nearest_mean == pytest.approx(1)
