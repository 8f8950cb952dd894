"""Claim: PMixed draws, mixes and charges as configured, and refuses impossible settings."""

import numpy as np
import torch

from privmix.privacy.accounting.published import largest_beta
from privmix.privacy.mollifiers.renyi import mollify
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocols.pmixed import PMixed
from tests.services.privacy.mechanism import normalised, random_rows, released, subsets, token_distribution


def test_one_part_or_none_has_the_distribution_of_the_mean_over_a_poisson_draw() -> None:
    public, parts = random_rows(4, 30)
    protocol, sets = PMixed(4, 0.3, 0.7), subsets(4)
    chances = [0.3 ** len(drawn) * 0.7 ** (4 - len(drawn)) for drawn in sets]
    means = normalised(released(protocol, public, parts, sets))
    np.testing.assert_allclose(token_distribution(protocol, public, parts), chances @ means, rtol=1e-6)


def test_the_renyi_mollifier_uses_the_beta_of_the_number_drawn() -> None:
    public, parts = random_rows(3, 40)
    protocol = PMixed(3, 0.5, mollifier="renyi", order=3, loss=0.02)
    models = [(0,), (0, 1, 2)]
    answers = shape(torch.tensor(np.array([public, public])).float(), torch.tensor(parts[[0, 0, 1, 2]]).float(), models)
    weights = protocol.distribution(answers).weights
    for row, (first, last) in enumerate(answers.spans()):
        bound = 3 * largest_beta(3, 0.5, last - first, 0.02)
        mean = mollify(answers.ratios[first:last], answers.public[row], 3, bound).double().mean(dim=0)
        assert torch.allclose(weights[row] / 2.0**61, (mean / mean.sum()).float(), rtol=1e-4)
