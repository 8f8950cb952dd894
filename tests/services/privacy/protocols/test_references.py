"""Claim: the reference protocols sample from the distributions in their names, and claim no privacy beyond them."""

import math

import numpy as np
import pytest
import torch

from privmix.privacy.accounting import planning
from privmix.privacy.events import Event
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.ensemble import Ensemble, EnsembleEvent, EnsembleSettings
from privmix.privacy.protocols.finetuned import Finetuned, FinetunedEvent, FinetunedSettings
from privmix.privacy.protocols.public import PublicEvent, PublicSettings


def test_the_public_model_alone_answers() -> None:
    public = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    protocol = PublicSettings().plan(5)
    assert protocol.draw() == ()
    for rows, models in ((torch.empty(0, 40), [()] * 3), (torch.zeros(3, 40).log_softmax(1), [(0,)] * 3)):
        weights = protocol.distribution(shape(public, rows, models)).weights
        np.testing.assert_allclose(weights / 2.0**61, public.exp(), rtol=1e-5)


@pytest.mark.parametrize("protocol", [Ensemble(4), Finetuned(1)])
def test_the_mean_of_the_part_models_is_released(protocol: Protocol) -> None:
    generator = torch.Generator().manual_seed(1)
    public = torch.randn(6, 40, generator=generator).log_softmax(1)
    rows = torch.randn(6 * protocol.parts, 40, generator=generator).mul(3).log_softmax(1)
    models = [protocol.draw()] * 6
    assert models[0] == tuple(range(protocol.parts))
    weights = protocol.distribution(shape(public, rows, models)).weights
    means = rows.exp().view(6, protocol.parts, 40).mean(dim=1)
    np.testing.assert_allclose(weights / 2.0**61, means, rtol=1e-4)


def test_the_public_model_costs_nothing() -> None:
    cost = planning.cost(PublicSettings().plan(8).event, 1000, 1e-5)
    assert (cost.epsilon_rdp, cost.epsilon_pld) == (0, 0)
    sentence = PublicEvent().guarantee.sentence("0.000", 1e-5, 10)
    assert "certified (nothing private is read)" in sentence


@pytest.mark.parametrize("event", [EnsembleEvent(), FinetunedEvent()])
def test_references_without_privacy_cost_infinitely_much(event: Event) -> None:
    cost = planning.cost(event, 1, 1e-5)
    assert (cost.epsilon_rdp, cost.epsilon_pld) == (math.inf, None)
    assert planning.cost(event, 0, 1e-5).epsilon_rdp == 0
    sentence = event.guarantee.sentence("unbounded", 1e-5, 10)
    assert sentence.startswith("No privacy guarantee: ")
    assert sentence.endswith(", for comparison.")


def test_one_model_is_an_ensemble_of_one_part() -> None:
    assert FinetunedSettings().plan(1) == Finetuned(1)
    assert EnsembleSettings().plan(3) == Ensemble(3)
    with pytest.raises(ValueError, match=r"parts must be 1 .* has 8.*`privmix train --parts 1`"):
        FinetunedSettings().plan(8)
