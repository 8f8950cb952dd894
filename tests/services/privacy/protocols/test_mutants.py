"""Claim: attacks on mechanisms find every planted fault, and none in a sound mechanism.

An attack that counts draws or tokens refutes a sound mechanism once in a million times. Others compare exact numbers,
and draw nothing that could decide.
"""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from torch import Tensor

from privmix.privacy.accounting import composition
from privmix.privacy.arrays import Integers
from privmix.privacy.mollifiers import projection
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols import PROTOCOLS, exponential, gnmax, pmixed, subsample_aggregate
from privmix.privacy.protocols.exponential import Exponential, FixedSizeExponentialEvent
from privmix.privacy.protocols.individual import Individual
from privmix.privacy.protocols.pmixed import PMixed
from privmix.privacy.sampling.categorical import quantise
from privmix.privacy.sampling.noise import discrete_gaussian, discrete_laplace
from privmix.privacy.sampling.randomness import fixed_size_subsample, poisson_subsample, uniform_below
from privmix.privacy.settings import Settings
from tests.support import mechanisms
from tests.support.formulas import has_formula
from tests.support.mechanisms import audited, of_draws, of_tokens, variants
from tests.support.worst_cases import worst_pairs

PARTS = 4
FEW = 64
"""Releases for an audit of which only the exact epsilon decides."""


def cases(of: Callable[[type[Settings]], bool]) -> list[Any]:
    """Returns the audited protocols and their parameters, filtered by their settings with ``of``."""
    return [
        pytest.param(name, parameters, id=f"{name}-{parameters}")
        for name, parameters in audited(PARTS)
        if of(PROTOCOLS[name])
    ]


EVERY = cases(lambda settings: True)
WITH_FORMULA = cases(lambda settings: has_formula(settings.mechanism))
"""Of other protocols, the tokens show the noise, and half the noise is detected."""
WITH_RADIUS = [case for case in WITH_FORMULA if case in cases(lambda settings: "radius" in settings.model_fields)]


def planned(name: str, tokens: int = 1, epsilon: float = 2.0, **parameters: Any) -> Protocol:
    return dataclasses.replace(_planned(name, tokens, epsilon, tuple(parameters.items())))  # without cached properties


@cache
def _planned(name: str, tokens: int, epsilon: float, parameters: tuple[tuple[str, Any], ...]) -> Any:
    return PROTOCOLS[name].model_validate({"epsilon": epsilon, "tokens": tokens, **dict(parameters)}).plan(PARTS)


def of_releases(protocol: Protocol) -> bool:
    differ = mechanisms.of_releases(protocol)
    assert differ is not None, "the protocol has a formula"
    return differ


def with_radius_off(patch: pytest.MonkeyPatch, factor: float = 1.05) -> None:
    def off(project: Callable[..., Tensor], u: Tensor, p0: Tensor, radius: float, out: Tensor | None) -> Tensor:
        return project(u, p0, factor * radius, out)

    for by in ("clip", "mix"):
        patch.setattr(projection, by, partial(off, getattr(projection, by)))
    clip: Any = Exponential.__dict__["_clip"]
    patch.setattr(Exponential, "_clip", property(lambda self: factor * clip.fget(self)))


@pytest.mark.parametrize(("tokens", "epsilon"), [(1, 2.0), (1024, 8.0), (1, 16.0)])
@pytest.mark.parametrize(("name", "parameters"), WITH_FORMULA)
def test_sound_releases_hold(name: str, parameters: dict[str, Any], tokens: int, epsilon: float) -> None:
    assert not of_releases(planned(name, tokens, epsilon, **parameters))


@pytest.mark.parametrize("factor", [0.95, 1.05])
@pytest.mark.parametrize("tokens", [1, 1024])
@pytest.mark.parametrize(("name", "parameters"), WITH_RADIUS)
def test_a_radius_wrong_by_5_percent_is_detected_in_the_releases(
    name: str, parameters: dict[str, Any], tokens: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is exact: it has no false alarms and no misses."""
    protocol = planned(name, tokens, 8.0, **parameters)
    with_radius_off(monkeypatch, factor)
    assert of_releases(protocol)


@pytest.mark.parametrize("tokens", [1024, 131_072])
def test_accounts_that_are_charged_5_percent_too_little_are_detected_in_the_releases(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = planned("individual", tokens, 8.0)
    grain = Individual._grain.func(protocol)  # type: ignore[attr-defined]
    monkeypatch.setattr(Individual, "_grain", property(lambda self: grain / 0.95))
    assert of_releases(protocol)


def test_scores_that_count_twice_are_detected_in_the_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exponential, "quantise", lambda weights: quantise(weights.square()))
    assert of_releases(Exponential(PARTS, 2, 0.3))


@pytest.mark.parametrize(("name", "parameters"), EVERY)
def test_a_certified_claim_holds_and_is_close(name: str, parameters: dict[str, Any]) -> None:
    """Fails by chance in at most 2 of a million runs: by the counts, and by the bound on epsilon."""
    tokens = 64 if name == "individual" else 4  # one token cannot spend much of an account
    found = of_tokens(planned(name, tokens, **parameters), tokens, 1_000 * tokens)
    assert not found.broken, found
    assert 0.2 * found.claim < found.exact <= found.claim


def test_an_exponential_mechanism_with_a_larger_radius_is_caught() -> None:
    claimed = FixedSizeExponentialEvent(2, 2, 0.5)
    assert of_tokens(Exponential(2, 2, 1.0), releases=100, claimed=claimed).broken


def test_too_little_noise_on_sums_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subsample_aggregate, "discrete_laplace", lambda sums, scale: discrete_laplace(sums, scale / 16))
    assert of_tokens(planned("subsample-aggregate"), releases=20_000).refuted


def test_half_the_noise_on_votes_is_caught() -> None:
    """The exact distributions detect it; a few thousand tokens reveal too little of the votes."""
    sound: Any = planned("gnmax", 16)
    halved = dataclasses.replace(sound, sigma=sound.sigma / 2)
    assert of_tokens(halved, 16, 1_000, claimed=sound.event).broken


def test_a_doubled_draw_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of PMixed lie 31 deviations or more from their means: a miss is below 1e-100."""
    monkeypatch.setattr(pmixed, "poisson_subsample", lambda parts, q: poisson_subsample(parts, 2 * q))
    monkeypatch.setattr(exponential, "fixed_size_subsample", lambda parts, m: fixed_size_subsample(parts, 2 * m))
    assert of_draws(PMixed(PARTS, 0.1, 1.0))
    assert of_draws(Exponential(PARTS, 2, 0.3))
    assert of_tokens(PMixed(PARTS, 0.1, 1.5)).broken


def test_a_part_that_is_chosen_more_often_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts lie 20 and 38 deviations from their means: a miss is below 1e-80."""
    monkeypatch.setattr(pmixed, "uniform_below", lambda bound: min(uniform_below(bound + 1), bound - 1))
    assert of_draws(PMixed(PARTS, 1.0, 1.0))
    assert of_tokens(PMixed(PARTS, 1.0, 1.5)).broken


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("pmixed", {}),
        ("pmixed", {"projection": "mix"}),
        ("pmixed", {"q": 0.25}),
        ("adapmixed", {}),
    ],
)
def test_a_radius_wrong_by_5_percent_is_detected_in_the_tokens(
    name: str, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is drawn: the exact epsilon of the worst pair's tokens exceeds the claim."""
    with_radius_off(monkeypatch)
    found = of_tokens(planned(name, **parameters), releases=FEW)
    assert found.exact > found.claim


@pytest.mark.parametrize(
    ("name", "parameters"), [case for case in EVERY if not {"gnmax", "individual"} & set(str(case.id).split("-"))]
)
def test_a_charge_for_each_sequence_instead_of_each_token_is_caught(
    name: str, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is drawn: the exact epsilon of 16 tokens exceeds what is charged for one."""
    protocol = planned(name, tokens=16, **parameters)
    monkeypatch.setattr(composition, "paid", lambda event, count: min(count, 1))
    found = of_tokens(protocol, tokens=16, releases=FEW)
    assert found.exact > found.claim


def test_draws_that_are_used_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    last: list[tuple[int, ...]] = []

    def twice(parts: int, q: float) -> tuple[int, ...]:
        if last:
            return last.pop()
        last.append(poisson_subsample(parts, q))
        return last[0]

    monkeypatch.setattr(pmixed, "poisson_subsample", twice)
    monkeypatch.setattr(pmixed, "uniform_below", lambda bound: 0)
    assert of_draws(PMixed(PARTS, 0.25, 1.0))


@pytest.mark.parametrize(
    ("module", "sampler", "noise", "name", "releases"),
    [
        (gnmax, "discrete_gaussian", discrete_gaussian, "gnmax", 4_000),
        (subsample_aggregate, "discrete_laplace", discrete_laplace, "subsample-aggregate", 40_000),
    ],
)
def test_noise_that_is_used_for_two_tokens_is_caught(
    module: Any,
    sampler: str,
    noise: Callable[[Integers, float], Integers],
    name: str,
    releases: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GNMax gives the same token twice; with the other noise, equal tokens are 14 deviations too many.

    A miss, at less than 5.2 deviations, is below 1e-17.
    """

    def twice(values: Integers, scale: float) -> Integers:
        fresh = noise(np.zeros_like(values[::2]), scale)
        return values + np.repeat(fresh, 2, axis=0)[: len(values)]

    monkeypatch.setattr(module, sampler, twice)
    assert of_tokens(planned(name), releases=releases).broken


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in audited(PARTS)))
def test_every_choice_of_a_protocol_is_a_variant_that_audits_try(name: str) -> None:
    """Covers choices between certified mechanisms; mechanisms as published have an audit of their own."""
    settings = PROTOCOLS[name]
    tried = [settings.model_validate(variant).model_dump() for variant in variants(name)]
    for field, info in settings.model_fields.items():
        for choice in get_args(info.annotation) if get_origin(info.annotation) is Literal else ():
            with_choice = settings.model_validate({field: choice})
            if with_choice.plan(PARTS).guarantee.status == "certified":
                assert any(variant[field] == choice for variant in tried), f"{field}: {choice}"


def test_every_certified_event_has_a_worst_case_and_a_formula_or_noise() -> None:
    for name, parameters in audited(PARTS):
        protocol = planned(name, **parameters)
        assert list(worst_pairs(protocol.event, protocol))
        assert protocol.noisy or mechanisms.of_releases(protocol) is not None
