"""Claim: every registered protocol and variant follows its description, survives storage and keeps its budget."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from privmix.privacy.accounting import planning
from privmix.privacy.events import Accountant, Event, from_json
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Answers, Protocol
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.adapmixed import AdaPMixed, AdaPMixedSettings
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.privacy.protocols.ensemble import EnsembleEvent
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.finetuned import FinetunedEvent
from privmix.privacy.protocols.gnmax import GNMax
from privmix.privacy.protocols.individual import Individual, IndividualSettings
from privmix.privacy.protocols.pmixed import PMixed
from privmix.privacy.protocols.public import PublicEvent
from privmix.privacy.protocols.submix import SubMix, SubMixSettings
from privmix.privacy.protocols.subsample_aggregate import SubsampleAggregate
from privmix.privacy.sampling.selection import SelectionEvent
from privmix.privacy.settings import Settings
from tests.support.formulas import formula
from tests.support.mechanisms import of_draws, variants
from tests.support.worst_cases import release_law

PARTS = 4
EVERY = [
    pytest.param(settings, parameters, id=" ".join([name, *(f"{key}={value}" for key, value in parameters.items())]))
    for name, settings in PROTOCOLS.items()
    for parameters in variants(name)
]
every = pytest.mark.parametrize(("chosen", "parameters"), EVERY)


def planned(chosen: type[Settings], parameters: Mapping[str, Any], tokens: int = 16, parts: int = PARTS) -> Protocol:
    return chosen.model_validate({"tokens": tokens, **parameters}).plan(1 if chosen.one_model else parts)


def answers(models: tuple[int, ...], sequences: int = 3, vocabulary: int = 2) -> Answers:
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(sequences, vocabulary, generator=generator).log_softmax(1)
    rows = torch.randn(sequences * len(models), vocabulary, generator=generator).mul(2).log_softmax(1)
    return shape(public, rows, [models] * sequences)


@every
def test_draws_follow_the_description(chosen: type[Settings], parameters: Mapping[str, Any]) -> None:
    protocol = planned(chosen, parameters)
    described = protocol.draws((protocol.models,))
    assert sum(described.values()) == pytest.approx(1)
    assert protocol.rows is None or max(size for (size,) in described) <= protocol.rows
    assert of_draws(protocol) == ()


@every
def test_a_release_has_weights_and_losses(chosen: type[Settings], parameters: Mapping[str, Any]) -> None:
    protocol = planned(chosen, parameters)
    answered = answers(protocol.draw())
    release = protocol.distribution(answered)
    assert release.weights.shape == answered.public.shape
    assert (release.weights >= 0).all()
    assert ((release.weights.sum(dim=1) > 0) & (release.weights.sum(dim=1) < 2**62)).all()
    assert (release.losses is not None) == protocol.event.measured
    if release.losses is not None:
        assert release.losses.shape in ((3, 1), (3, protocol.parts))


@every
def test_the_distributions_agree(chosen: type[Settings], parameters: Mapping[str, Any]) -> None:
    """An evaluation's distribution is the mean over draws of a release's distribution, which follows the formula."""
    protocol = planned(chosen, parameters)
    drawn = protocol.draw()
    answered = answers(drawn)
    given = release_law(protocol, answered)
    torch.testing.assert_close(given.sum(dim=1), torch.ones(3, dtype=torch.float64))
    public, rows = answered.public.double(), answered.ratios.double().view(3, len(drawn), 2)
    for sequence in range(3):
        probabilities = rows[sequence] * public[sequence]
        stated = formula(protocol, public[sequence].numpy(), probabilities.numpy())
        if stated is not None:
            np.testing.assert_allclose(given[sequence].numpy(), stated, atol=2e-4)
    law = protocol.law(answers(tuple(range(protocol.models))))
    if law is not None:
        everyone = answers(tuple(range(protocol.models)))
        mean = torch.zeros_like(law)
        for counts, chance in protocol.draws((1,) * protocol.models).items():
            models = tuple(model for model, count in enumerate(counts) if count)
            ratios = everyone.ratios.view(3, protocol.models, 2)[:, list(models)].flatten(0, 1)
            mean += chance * release_law(protocol, Answers(everyone.public, ratios, (models,) * 3))
        torch.testing.assert_close(law, mean, rtol=1e-6, atol=1e-9)


@every
def test_an_event_survives_storage(chosen: type[Settings], parameters: Mapping[str, Any]) -> None:
    event = planned(chosen, parameters).event
    again = from_json(event.to_json())
    assert (again, hash(again), type(again)) == (event, hash(event), type(event))
    np.testing.assert_array_equal(again.rdp([2.0, 3.0]), event.rdp([2.0, 3.0]))


@every
@pytest.mark.parametrize(("parts", "tokens", "epsilon"), [(PARTS, 64, 8.0), (80, 1024, 8.0), (3, 20, 4.0)])
def test_a_certified_plan_spends_its_budget_and_no_more(
    chosen: type[Settings], parameters: Mapping[str, Any], parts: int, tokens: int, epsilon: float
) -> None:
    promised = parameters if chosen.derived is None else {"epsilon": epsilon, **parameters}
    protocol = planned(chosen, promised, tokens, parts)
    losses = protocol.event.rdp([1.5, 2.0, 4.0, 16.0])
    assert (losses >= 0).all()
    assert (losses[1:] >= losses[:-1] - 1e-12).all(), "a divergence does not decrease with its order"
    if protocol.guarantee.status == "certified" and chosen.derived is not None:
        cost = planning.cost(protocol.event, tokens, 1e-5)
        assert 0.99 * epsilon < cost.epsilon <= epsilon * (1 + 1e-9)


@pytest.mark.parametrize(
    ("event", "epsilons"),
    [(PublicEvent(), (0, 0)), (EnsembleEvent(), (math.inf, None)), (FinetunedEvent(), (math.inf, None))],
)
def test_references_cost_nothing_or_infinitely_much(event: Event, epsilons: tuple[float, float | None]) -> None:
    cost = planning.cost(event, 1000, 1e-5)
    assert (cost.epsilon_rdp, cost.epsilon_pld) == epsilons
    assert planning.cost(event, 0, 1e-5).epsilon_rdp == 0


@every
def test_sequences_in_one_call_do_not_affect_each_other(chosen: type[Settings], parameters: Mapping[str, Any]) -> None:
    """Protocols with noise have tests of their own, of what the noise is added to."""
    protocol = planned(chosen, parameters)
    if protocol.noisy:
        return
    models = [protocol.draw() for _ in range(6)]
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(len(models), 300, generator=generator).log_softmax(1)
    rows = [torch.randn(len(drawn), 300, generator=generator).mul(2).log_softmax(1) for drawn in models]
    together = protocol.distribution(shape(public, torch.cat(rows), models))
    for number, drawn in enumerate(models):
        alone = protocol.distribution(shape(public[number : number + 1], rows[number], [drawn]))
        torch.testing.assert_close(alone.weights[0].double(), together.weights[number].double(), rtol=1e-5, atol=0)
        if alone.losses is not None and together.losses is not None:
            np.testing.assert_allclose(alone.losses[0], together.losses[number], rtol=1e-12)


TRAINED, CHOSEN = DpSgdEvent("user", 1.0, 0.1, 1), SelectionEvent(1.0)
IMPOSSIBLE: list[tuple[Any, dict[str, tuple[Any, ...]]]] = [
    (PMixed(8, 0.25, 0.4), {"parts": (0, 2.5), "q": (0.0, 1.01), "radius": (None, -1.0, 40.0, 1e-5), "order": (3,)}),
    (PMixed(8, 0.25, 0.4), {"mollifier": ("magic", "renyi"), "projection": ("magic",)}),
    (PMixed(8, 0.25, mollifier="renyi", order=3, loss=0.02), {"order": (1,), "loss": (None, 0.0)}),
    (AdaPMixed(8, radius=0.4), {"parts": (0,), "radius": (None, math.nan), "beta": (0.2,), "order": (1.0,)}),
    (AdaPMixed(8, radius=0.4), {"mollifier": ("magic",), "projection": ("magic",), "enforce": ("magic",)}),
    (AdaPMixed(8, "renyi", beta=0.2, enforce="measured"), {"beta": (None, math.inf), "enforce": ("bound",)}),
    (Exponential(8, 2, 0.4), {"parts": (0, 2.5), "sample": (0, 9, 1.5), "radius": (0.0, math.inf, 40.0)}),
    (Exponential(10**7, 2, 0.4), {"sample": (10**7,)}),
    (GNMax(8, 4.0), {"parts": (0,), "sigma": (0.0, math.inf, 1e7), "candidates": (0,), "order": (1.0,)}),
    (SubsampleAggregate(8, 4.0), {"parts": (0,), "scale": (0.0, math.inf, 1e7), "candidates": (0,)}),
    (SubMix(8, 4.0, 0.01), {"parts": (0,), "order": (math.inf,), "beta": (math.nan,)}),
    (Individual(3, 0.3, 0.1, 10.0, 0.2, 0.3, 8), {"parts": (1,), "lower": (1.0,), "cap": (0.5,), "tokens": (0,)}),
    (Individual(3, 0.3, 0.1, 10.0, 0.2, 0.3, 8), {"upper": (2.0,), "ratio": (5.0,)}),
    (TRAINED, {"unit": ("part",), "noise_multiplier": (0.0, math.inf), "sampling_rate": (0.0, 1.5), "steps": (0,)}),
    (CHOSEN, {"epsilon": (0.0, math.inf), "unit": ("row",), "rounds": (0,)}),
]


@pytest.mark.parametrize(("sound", "impossible"), IMPOSSIBLE)
def test_impossible_parameters_are_refused_by_name(sound: Any, impossible: dict[str, tuple[Any, ...]]) -> None:
    for field, values in impossible.items():
        for value in values:
            with pytest.raises(ValueError, match=field):
                getattr(dataclasses.replace(sound, **{field: value}), "event", None)


IMPOSSIBLE_SETTINGS: list[tuple[Settings, float, dict[str, tuple[Any, ...]]]] = [
    (AdaPMixedSettings(), 18, {"radius": (40.0,), "sigma": (0.0,), "mix": (1.5,), "top_k": (1,)}),
    (AdaPMixedSettings(), 18, {"threshold": (-1.0,), "epsilon": (None,)}),
    (AdaPMixedSettings(enforce="measured"), 18, {"order": (2.0,)}),
    (AdaPMixedSettings(mollifier="renyi"), 18, {"enforce": ("bound",), "radius": (1.0,), "beta": (1e-9,)}),
    (SubMixSettings(), 4, {"order": (1.0, 3.0), "beta": (0.0, 1e-12), "epsilon": (None, 0.01)}),
    (IndividualSettings(), 4, {"lower": (1.0,), "cap": (0.9,), "epsilon": (None,)}),
]


@pytest.mark.parametrize(("sound", "order", "impossible"), IMPOSSIBLE_SETTINGS)
def test_impossible_settings_are_refused_by_name(
    sound: Settings, order: float, impossible: dict[str, tuple[Any, ...]]
) -> None:
    sound.plan(8, Accountant(order))
    for field, values in impossible.items():
        for value in values:
            with pytest.raises(ValueError, match=field):
                type(sound).model_validate(sound.model_dump() | {field: value}).plan(8, Accountant(order))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_invalid_settings_are_refused_by_name(name: str) -> None:
    chosen = PROTOCOLS[name]
    with pytest.raises(ValidationError, match="no_such_parameter"):
        chosen.model_validate({"no_such_parameter": 1})
    with pytest.raises(ValidationError, match="tokens"):
        chosen.model_validate({"tokens": 0})
    with pytest.raises(ValidationError, match="delta"):
        chosen.model_validate({"delta": 1.0})
    if chosen.one_model:
        with pytest.raises(ValueError, match="parts must be 1"):
            chosen.model_validate({}).plan(2)
