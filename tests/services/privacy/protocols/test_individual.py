"""Claim (README, Theorem 4): what a part's account pays for bounds what all tokens together tell of the part.

Divergences are those of the integer weights that the service samples with.
"""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from privmix.privacy.accounting.tilts import account_rdp, moment_factor
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Answers
from privmix.privacy.protocols.individual import WHOLE, Individual, IndividualSettings
from tests.services.privacy.mechanism import Rows, climb, laws, log_softmax, renyi_divergence

pytestmark = pytest.mark.usefixtures("operators")

ORDERS = (1.05, 1.7, 2.0, 3.0, 8.0, 32.0)
Grains = NDArray[np.int64]


def protocol(parts: int = 3, lower: float = 0.3, upper: float = 1.5, **changes: Any) -> Individual:
    ratio = min(4.0, 1.001 * (upper + lower) / (parts * (1 - lower)) + 1e-5)
    fields: dict[str, Any] = {"cap": 10.0, "size": 0.2, "ratio": ratio, "tokens": 8, **changes}
    return Individual(parts=parts, lower=lower, upper=upper, **fields)


def answers(public: Rows, rows: Rows, allowances: Grains) -> Answers:
    """Returns the answers to S queries: logits [S, V] and [S, n, V]; allowances [S, n] in grains."""
    shaped = shape(
        torch.tensor(public, dtype=torch.float32),
        torch.tensor(rows.reshape(-1, rows.shape[-1]), dtype=torch.float32),
        [tuple(range(rows.shape[1]))] * len(public),
    )
    return dataclasses.replace(shaped, allowances=torch.tensor(allowances, dtype=torch.int64))


def released(mechanism: Individual, public: Rows, rows: Rows, allowances: Grains) -> tuple[Rows, Grains]:
    """Returns the exact distributions, float64 [S, V], and the charges, int64 [S, n]."""
    release = mechanism.distribution(answers(public, rows, allowances))
    assert release.charges is not None
    return laws(release), release.charges.numpy()


def shares(mechanism: Individual, logits: Rows, spent: tuple[bool, bool]) -> list[float]:
    """Returns each divergence when the last part is replaced, as a share of what the two charges allow."""
    public, *rows = log_softmax(logits[:-1])
    *others, before, after = rows
    budgets = np.exp2(np.clip(logits[-1], -6, 0) + 40).astype(np.int64)
    worlds, charges = [], []
    for own, is_spent in zip((before, after), spent, strict=True):
        allowances = np.resize(budgets, mechanism.parts)
        allowances[-1] *= not is_spent
        distribution, charged = released(mechanism, public[None], np.array([[*others, own]]), allowances[None])
        assert (charged <= allowances).all()
        worlds.append(distribution[0])
        charges.append(charged[0, -1] / WHOLE * mechanism.size)
    distance = (math.sqrt(charges[0]) + math.sqrt(charges[1])) ** 2
    if not distance:
        np.testing.assert_array_equal(worlds[0], worlds[1])
        return [0.0]
    allowed = moment_factor(ORDERS, mechanism.ratio) * distance
    return [
        renyi_divergence(p, q, order) / bound
        for p, q in (worlds, worlds[::-1])
        for order, bound in zip(ORDERS, allowed, strict=True)
    ]


@pytest.mark.parametrize("spent", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("parts", "lower", "upper"), [(2, 0.5, 0.4), (3, 0.1, 1.5), (6, 0.8, 0.2), (3, 0.2, 8.0)])
def test_no_token_tells_more_than_is_charged(parts: int, lower: float, upper: float, spent: tuple[bool, bool]) -> None:
    mechanism = protocol(parts, lower, upper, size=2.0)
    rng = np.random.default_rng(parts)
    found, _ = climb(lambda logits: max(shares(mechanism, logits, spent)), (parts + 3, 3), 60, rng)
    assert found <= 1


def play(mechanism: Individual, inputs: Rows, length: int, policy: Callable[[Grains], Grains]) -> tuple[Rows, Rows]:
    """Plays all histories of `length` tokens in two worlds; returns their log-probabilities, float64 [histories] each.

    The adversary is adaptive: `inputs`, logits [nodes, parts + 2, V], holds the models' outputs after each history. The
    last two rows are those of the part in either world.
    """
    vocabulary, totals = inputs.shape[-1], []
    rows = log_softmax(inputs)
    for own in (-2, -1):
        log_chances, left, first = np.zeros(1), np.full((1, mechanism.parts), WHOLE), 0
        for _ in range(length):
            nodes = rows[first : first + len(left)]
            parts = np.concatenate([nodes[:, 1:-2], nodes[:, [own]]], axis=1)
            chances, charges = released(mechanism, nodes[:, 0], parts, policy(left))
            left = np.repeat(left - charges, vocabulary, axis=0)
            assert (left >= 0).all()
            log_chances = (log_chances[:, None] + np.log(chances)).ravel()
            first += len(nodes)
        totals.append(log_chances)
    return totals[0], totals[1]


def divergence_of_histories(
    mechanism: Individual, inputs: Rows, length: int, policy: Callable[[Grains], Grains]
) -> Rows:
    p, q = play(mechanism, inputs, length, policy)
    return np.array(
        [
            np.logaddexp.reduce(order * a + (1 - order) * b) / (order - 1)
            for a, b in ((p, q), (q, p))
            for order in ORDERS
        ]
    )


def halves(left: Grains) -> Grains:
    return left // 2


def everything(left: Grains) -> Grains:
    return left


@pytest.mark.parametrize("policy", [halves, everything])
@pytest.mark.parametrize("size", [0.002, 0.05])
def test_no_adaptive_adversary_learns_more_than_an_account_allows(
    size: float, policy: Callable[[Grains], Grains]
) -> None:
    length, vocabulary = 4, 2
    mechanism = protocol(2, 0.4, 0.4, size=size)
    bounds = np.tile(account_rdp(ORDERS, mechanism.size, mechanism.ratio), 2)
    nodes = sum(vocabulary**depth for depth in range(length))

    def share(inputs: Rows) -> float:
        return float((divergence_of_histories(mechanism, inputs, length, policy) / bounds).max())

    found, _ = climb(share, (nodes, mechanism.parts + 2, vocabulary), 60, np.random.default_rng(0))
    assert 0.02 < found <= 1


def test_a_tilt_keeps_its_bounds_and_its_charge_covers_its_exact_variance() -> None:
    mechanism = protocol(4, 0.2, 1.0, cap=3.0)
    rng = np.random.default_rng(2)
    public, rows = rng.normal(scale=3, size=(40, 6)), rng.normal(scale=4, size=(40, 4, 6))
    rows[::3] = public[::3, None] + 1e-4 * rows[::3]  # parts that hardly say anything
    allowances = np.exp2(rng.uniform(0, 40, size=(40, 4))).astype(np.int64)
    whole = answers(log_softmax(public), log_softmax(rows), allowances)
    ratios = whole.ratios.view(40, 4, 6)
    for i in range(4):
        tilts, charges = mechanism.tilts(ratios[:, [i]], whole.public, torch.tensor(allowances[:, [i]]))
        for p0, tilt, charge in zip(whole.public.tolist(), tilts.tolist(), charges[:, 0].tolist(), strict=True):
            total = sum(map(Fraction, p0))
            exact = [(Fraction(p) / total, Fraction(w)) for p, w in zip(p0, tilt, strict=True)]
            assert min(tilt) >= -0.2 - 1e-7
            assert max(tilt) <= 1.0 + 1e-7
            assert abs(float(sum(p * w for p, w in exact))) < 1e-12
            variance = sum((p * w * w for p, w in exact), Fraction())
            loss = variance / (mechanism.parts**2 * (1 - Fraction(mechanism.lower)))
            assert Fraction(charge) >= loss / Fraction(mechanism.size) * WHOLE
            assert (charge == 0) == (not any(tilt))


def test_a_tiny_tilt_pays_for_what_rounding_to_integers_makes_of_it() -> None:
    """A rare token has a weight near 2^25, so it changes by 2^-25 or not at all: a wanted half becomes one."""
    mechanism = protocol(2, 0.2, 1.0, size=2.0**-50)
    count, rare = 400, 1.1 * 2.0**-36  # a rarer token is dropped
    public = np.log([1 - 2 * rare, rare, rare])
    own = np.log([1 - 66 * rare, 65 * rare, rare])
    allowances = np.array([[0, int(grains)] for grains in np.geomspace(1, WHOLE, count)])
    whole = answers(np.tile(public, (count, 1)), np.tile([public, own], (count, 1, 1)), allowances)
    release = mechanism.distribution(whole)
    other = mechanism.distribution(dataclasses.replace(whole, allowances=torch.zeros((count, 2), dtype=torch.int64)))
    assert release.charges is not None
    tiny = 0
    for weights, unmoved, charge in zip(
        release.weights.tolist(), other.weights.tolist(), release.charges[:, 1].tolist(), strict=True
    ):
        p, q = ([Fraction(weight, sum(row)) for weight in row] for row in (weights, unmoved))
        chi_square = sum(((a - b) ** 2 / b for a, b in zip(p, q, strict=True)), Fraction())
        assert chi_square <= Fraction(charge, WHOLE) * Fraction(mechanism.size)
        tiny += weights[1] - unmoved[1] == 1
    assert tiny


def test_bounds_hold_with_a_large_vocabulary_and_the_smallest_probabilities() -> None:
    """Rounding to integers is worst where p0 is near 2**-36."""
    mechanism = protocol(16, 0.4, 3.0, tokens=4)
    generator = torch.Generator().manual_seed(0)
    public = (torch.randn(2, 50_000, generator=generator) * 4).log_softmax(1)
    rows = (torch.randn(32, 50_000, generator=generator) * 6).log_softmax(1)
    shaped = shape(public, rows, [tuple(range(16))] * 2)
    release = mechanism.distribution(shaped)
    kept = shaped.public > 0
    p0 = shaped.public.double() / shaped.public.double().sum(dim=1, keepdim=True)
    law = release.weights.double() / release.weights.double().sum(dim=1, keepdim=True)
    assert float(p0[kept].min()) < 2.0**-34
    assert float((law[kept] / p0[kept]).min()) >= (1 - 0.4) * (1 - 2.0**-20)
    assert (law[~kept] == 0).all()
    assert release.charges is not None
    assert (release.charges <= WHOLE // 4).all()


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="parts must be at least 2"):
        IndividualSettings().plan(1)
    with pytest.raises(ValidationError, match="lower"):
        IndividualSettings(lower=1.0)
    with pytest.raises(ValidationError, match="cap"):
        IndividualSettings(cap=0.9)
    with pytest.raises(ValueError, match="epsilon must be a number"):
        IndividualSettings(epsilon=None).plan(4)
    for models in ((0, 1), (0, 2, 1)):  # another order would charge other parts
        asked = Answers(torch.full((1, 2), 0.5), torch.ones(len(models), 2), (models,))
        with pytest.raises(ValueError, match="models must name all 3 parts"):
            protocol(3).distribution(asked)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_accounts_do_not_change_with_the_number_of_parts(epsilon: float) -> None:
    planned = [IndividualSettings(epsilon=epsilon).plan(parts) for parts in (2, 3, 16, 128, 1000)]
    assert len({own.event for own in planned}) == 1
    assert all(own.lower <= own.upper * (1 + 1e-9) for own in planned)
