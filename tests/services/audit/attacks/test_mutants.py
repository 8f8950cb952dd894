"""Claim: the audits call every planted fault broken, and nothing else, three runs in a row."""

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from services.audit.attacks import likelihood
from services.audit.attacks.frequencies import audit_draws
from services.audit.report.finding import Finding
from services.privacy.accounting import composition
from services.privacy.mollifiers import projection
from services.privacy.protocol import Protocol
from services.privacy.protocols import PROTOCOLS, audited, exponential, gnmax, pmixed, subsample_aggregate
from services.privacy.protocols.exponential import Exponential
from services.privacy.protocols.pmixed import PMixed
from services.privacy.sampling.noise import Integers, discrete_gaussian, discrete_laplace
from services.privacy.sampling.randomness import fixed_size_subsample, poisson_subsample

DELTA = 1e-5
PARTS = 4
RUNS = 3
EVERY = [pytest.param(name, parameters, id=f"{name}-{parameters}") for name, parameters in audited(PARTS)]


def planned(name: str, tokens: int = 1, epsilon: float = 2.0, **parameters: Any) -> Protocol:
    return PROTOCOLS[name].model_validate({"epsilon": epsilon, "tokens": tokens, **parameters}).plan(PARTS)


def verdicts(audit: Callable[[], Finding]) -> set[str]:
    return {audit().verdict for _ in range(RUNS)}


def of_tokens(protocol: Protocol, tokens: int = 1, releases: int = 20_000) -> Callable[[], Finding]:
    return lambda: likelihood.audit(protocol, tokens=tokens, delta=DELTA, releases=releases).finding


def of_draws(protocol: Protocol) -> Callable[[], Finding]:
    return lambda: audit_draws(protocol, 4_000)


@pytest.mark.parametrize(("name", "parameters"), EVERY)
def test_sound_draws_hold(name: str, parameters: dict[str, Any]) -> None:
    assert verdicts(of_draws(planned(name, **parameters))) == {"holds"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("name", "parameters"), EVERY)
def test_sound_tokens_hold(name: str, parameters: dict[str, Any]) -> None:
    assert "broken" not in verdicts(of_tokens(planned(name, **parameters), releases=8_000))


def test_a_doubled_draw_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmixed, "poisson_subsample", lambda parts, q: poisson_subsample(parts, 2 * q))
    monkeypatch.setattr(exponential, "fixed_size_subsample", lambda parts, m: fixed_size_subsample(parts, 2 * m))
    assert verdicts(of_draws(PMixed(PARTS, 0.1, 1.0))) == {"broken"}
    assert verdicts(of_draws(Exponential(PARTS, 2, 0.3))) == {"broken"}
    assert verdicts(of_tokens(PMixed(PARTS, 0.1, 1.5))) == {"broken"}


@pytest.mark.slow
@pytest.mark.long
def test_a_part_that_is_chosen_more_often_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(drawn: tuple[int, ...]) -> int:
        return int(np.random.default_rng().choice([*drawn, drawn[-1]]))

    monkeypatch.setattr(secrets, "choice", choice)
    assert verdicts(of_draws(PMixed(PARTS, 1.0, 1.0))) == {"broken"}
    assert verdicts(of_tokens(PMixed(PARTS, 1.0, 1.5))) == {"broken"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("pmixed", {}),
        ("pmixed", {"projection": "mix"}),
        ("pmixed", {"q": 0.25}),
        ("adapmixed", {}),
    ],
)
def test_a_radius_off_by_a_twentieth_is_caught(
    name: str, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for by in ("clip", "mix"):
        project = getattr(projection, by)
        monkeypatch.setattr(
            projection, by, lambda u, p0, radius, out, project=project: project(u, p0, 1.05 * radius, out)
        )
    assert verdicts(of_tokens(planned(name, **parameters), releases=4_000)) == {"broken"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("name", "parameters"), [each for each in EVERY if "gnmax" not in str(each.id)])
def test_a_charge_for_each_sequence_instead_of_each_token_is_caught(
    name: str, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = planned(name, tokens=16, **parameters)
    monkeypatch.setattr(composition, "paid", lambda event, count: min(count, 1))
    assert verdicts(of_tokens(protocol, tokens=16, releases=4_000)) == {"broken"}


def test_draws_that_are_used_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    last: list[tuple[int, ...]] = []

    def twice(parts: int, q: float) -> tuple[int, ...]:
        if last:
            return last.pop()
        last.append(poisson_subsample(parts, q))
        return last[0]

    monkeypatch.setattr(pmixed, "poisson_subsample", twice)
    monkeypatch.setattr(secrets, "choice", lambda drawn: drawn[0])
    assert verdicts(of_draws(PMixed(PARTS, 0.25, 1.0))) == {"broken"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "sampler", "noise", "name"),
    [
        (gnmax, "discrete_gaussian", discrete_gaussian, "gnmax"),
        (subsample_aggregate, "discrete_laplace", discrete_laplace, "subsample-aggregate"),
    ],
)
def test_noise_that_is_used_for_two_tokens_is_caught(
    module: Any, sampler: str, noise: Callable[[Integers, float], Integers], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(values: Integers, scale: float) -> Integers:
        fresh = noise(np.zeros_like(values[::2]), scale)
        return values + np.repeat(fresh, 2, axis=0)[: len(values)]

    monkeypatch.setattr(module, sampler, twice)
    assert verdicts(of_tokens(planned(name), releases=8_000)) == {"broken"}


def test_no_certified_protocol_is_left_out() -> None:
    certified = {
        name
        for name, settings in PROTOCOLS.items()
        if not settings.one_model and settings.model_validate({}).plan(PARTS).guarantee.status == "certified"
    }
    assert {name for name, _ in audited(PARTS)} == certified - {"public"}
