"""Claim: PMixed draws, mixes and charges as configured, and refuses impossible settings."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from privmix.privacy.accounting.published import largest_beta
from privmix.privacy.mollifiers.renyi import mollify
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocols.pmixed import PMixed, PublishedEvent, RatioEvent
from privmix.privacy.sampling.categorical import sample
from tests.services.privacy.mechanism import log_softmax, normalised, released, subsets, token_distribution


def rows(parts: int, vocabulary: int, seed: int = 0) -> tuple[Any, Any]:
    public, *others = log_softmax(np.random.default_rng(seed).normal(scale=2, size=(parts + 1, vocabulary)))
    return public, np.array(others)


def test_the_public_model_answers_an_empty_draw() -> None:
    public, parts = rows(2, 50)
    (weights,) = released(PMixed(2, 0.5, 0.7), public, parts, [()])
    np.testing.assert_allclose((weights / weights.sum()).astype(float), np.exp(public), rtol=1e-5)


def test_the_mean_of_the_projected_parts_is_released() -> None:
    public, parts = rows(4, 64)
    first, second, both = released(PMixed(4, 0.5, 0.7), public, parts, [(1,), (3,), (1, 3)])
    mean = (first / first.sum() + second / second.sum()).astype(float) / 2
    np.testing.assert_allclose((both / both.sum()).astype(float), mean, rtol=1e-9)


def test_tokens_follow_the_charged_distribution() -> None:
    """Compares tokens that are drawn and sampled one by one with the mean over all draws."""
    public, parts = rows(3, 4)
    protocol = PMixed(3, 0.6, 1.5)
    draws = [protocol.draw() for _ in range(20_000)]
    assert max(map(len, draws)) == protocol.rows == 1
    weights = dict(zip(((), (0,), (1,), (2,)), released(protocol, public, parts, [(), (0,), (1,), (2,)]), strict=True))
    tokens = Counter[int]()
    for drawn, count in Counter(draws).items():
        tokens.update(sample(torch.tensor([weights[drawn].tolist()] * count)))
    law = token_distribution(protocol, public, parts)
    for token, chance in enumerate(law):
        assert abs(tokens[token] - 20_000 * chance) <= 6 * np.sqrt(20_000 * chance * (1 - chance))


def test_one_part_or_none_has_the_distribution_of_the_mean_over_a_poisson_draw() -> None:
    public, parts = rows(4, 30)
    protocol, sets = PMixed(4, 0.3, 0.7), subsets(4)
    chances = [0.3 ** len(drawn) * 0.7 ** (4 - len(drawn)) for drawn in sets]
    means = normalised(released(protocol, public, parts, sets))
    np.testing.assert_allclose(token_distribution(protocol, public, parts), chances @ means, rtol=1e-6)


def test_the_renyi_mollifier_uses_the_beta_of_the_number_drawn() -> None:
    public, parts = rows(3, 40)
    protocol = PMixed(3, 0.5, mollifier="renyi", order=3, loss=0.02)
    models = [(0,), (0, 1, 2)]
    answers = shape(torch.tensor(np.array([public, public])).float(), torch.tensor(parts[[0, 0, 1, 2]]).float(), models)
    weights = protocol.distribution(answers).weights
    for row, (first, last) in enumerate(answers.spans()):
        bound = 3 * largest_beta(3, 0.5, last - first, 0.02)
        mean = mollify(answers.ratios[first:last], answers.public[row], 3, bound).double().mean(dim=0)
        assert torch.allclose(weights[row] / 2.0**61, (mean / mean.sum()).float(), rtol=1e-4)


def test_the_cost_of_a_token() -> None:
    assert PMixed(8, 0.25, 0.4).event == RatioEvent(8, 0.25, 0.4)
    assert PMixed(8, 0.25, 0.4, projection="mix").event == RatioEvent(8, 0.25, 0.4)
    published = PMixed(8, 0.25, mollifier="renyi", order=3, loss=0.02)
    assert published.event == PublishedEvent(8, 0.25, 3, 0.02)
    assert published.guarantee.status == "as published"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"parts": 0}, "parts"),
        ({"parts": 2.5}, "parts"),
        ({"q": 0.0}, "q"),
        ({"q": 1.01}, "q"),
        ({"radius": None}, "radius"),
        ({"radius": -1.0}, "radius"),
        ({"radius": 40.0}, "radius"),
        ({"radius": 1e-5}, "radius"),
        ({"mollifier": "magic"}, "mollifier"),
        ({"projection": "magic"}, "projection"),
        ({"order": 3}, "order"),
        ({"mollifier": "renyi"}, "renyi"),
        ({"mollifier": "renyi", "radius": None, "order": 3}, "loss"),
        ({"mollifier": "renyi", "radius": None, "order": 1, "loss": 0.1}, "order"),
        ({"mollifier": "renyi", "radius": None, "order": 3, "loss": 0.0}, "loss"),
    ],
)
def test_impossible_settings_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PMixed(**{"parts": 8, "q": 0.25, "radius": 0.4, **fields})
