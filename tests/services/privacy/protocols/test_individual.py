"""Claim (README, Theorem 4): what a part's account pays for bounds what all tokens together tell of the part.

Divergences are those of the integer weights that the service samples with.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from privmix.privacy.accounting.tilts import account_rdp, moment_factor
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Answers
from privmix.privacy.protocols.individual import WHOLE, Individual, IndividualSettings
from tests.services.privacy.mechanism import Rows, climb, laws, log_softmax, renyi_divergence
from tests.support.mechanisms import of_releases

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


def told(mechanism: Individual, public: Rows, worlds: Sequence[Rows], allowances: Sequence[Grains]) -> float:
    """Returns the largest divergence between two worlds, as a share of what the last part's two charges allow.

    Args:
        public: log-probabilities [V].
        worlds, allowances: the log-probabilities [n, V] and grains [n] of all parts, in each world.
    """
    released_in, distance = [], 0.0
    for rows, allowed in zip(worlds, allowances, strict=True):
        law, charges = released(mechanism, public[None], rows[None], allowed[None])
        if not ((charges >= 0) & (charges <= allowed)).all():
            return math.inf
        released_in.append(law[0])
        distance += math.sqrt(charges[0, -1] / WHOLE * mechanism.size)
    pairs = released_in, released_in[::-1]
    lost = np.array([renyi_divergence(p, q, order) for p, q in pairs for order in ORDERS])
    bounds = np.tile(moment_factor(ORDERS, mechanism.ratio) * distance**2, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float((lost / bounds)[lost > 1e-14].max(initial=0.0))  # less is the rounding of distributions


@pytest.mark.parametrize("spent", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("parts", "lower", "upper"), [(2, 0.5, 0.4), (3, 0.1, 1.5), (6, 0.8, 0.2), (3, 0.2, 8.0)])
def test_no_token_tells_more_than_is_charged(parts: int, lower: float, upper: float, spent: tuple[bool, bool]) -> None:
    mechanism = protocol(parts, lower, upper, size=2.0)

    def share(logits: Rows) -> float:
        public, *rows = log_softmax(logits[:-1])
        *others, before, after = rows
        budgets = np.resize(np.exp2(np.clip(logits[-1], -6, 0) + 40).astype(np.int64), parts)
        allowances = [np.array([*budgets[:-1], 0 if is_spent else budgets[-1]]) for is_spent in spent]
        return told(mechanism, public, [np.array([*others, own]) for own in (before, after)], allowances)

    assert climb(share, (parts + 3, 3), 60, np.random.default_rng(parts))[0] <= 1


def revealing(parts: int) -> Iterator[tuple[Rows, Rows, Rows]]:
    """Yields p0 and two worlds: the last part moves two rare tokens, which others avoid. That attains the bound."""
    public = np.array([0.02, 0.02, 0.96])
    others = [np.log([1e-9, 1e-9, 1 - 2e-9])] * (parts - 1)
    for step in (0.05, 0.2, 0.8):
        before, after = (
            np.array([*others, np.log(public * (1 + sign * np.array([step, -step, 0.0])))]) for sign in (1, -1)
        )
        yield np.log(public), before, after


def differing(parts: int) -> Iterator[tuple[Rows, Rows, Rows]]:
    """Yields p0 and two random worlds, which differ in the last part."""
    generator = np.random.default_rng(0)
    for spread in np.geomspace(0.2, 2, 8):
        public = log_softmax(generator.normal(scale=2.0, size=12))
        rows = log_softmax(public + generator.normal(scale=spread, size=(parts + 1, 12)))
        yield public, rows[:-1], np.concatenate([rows[:-2], rows[-1:]])


def account_faults(tokens: int = 1024, epsilon: float = 8.0) -> list[str]:
    """Compares charges with what the releases tell, without statistics. With many parts a token's bound is tight."""
    mechanism = dataclasses.replace(IndividualSettings(epsilon=epsilon, tokens=tokens).plan(4), parts=64)
    cases = [*revealing(64), *differing(64)]

    def allowed(own: int) -> Grains:
        return np.array([*[WHOLE] * 63, own])

    def speaks(public: Rows, *worlds: Rows) -> bool:
        (first, paid), (second, _) = (
            released(mechanism, public[None], rows[None], allowed(0)[None]) for rows in worlds
        )
        return bool(paid[0, -1]) or not np.array_equal(first, second)

    one = WHOLE // tokens
    spent = ((one, one), (0, one), (one, 0))
    largest = max(told(mechanism, *case[:1], case[1:], list(map(allowed, own))) for case in cases for own in spent)
    found = [f"a token tells {largest:.3g} times as much of a part as is charged"] if largest > 1 + 1e-6 else []
    found += ["a part whose account is empty changes a token"] if any(speaks(*case) for case in cases) else []
    looks = any(looks_at_others(mechanism, *case[:2]) for case in cases)
    return found + (["what a part says or pays depends on another part"] if looks else [])


def looks_at_others(mechanism: Individual, public: Rows, rows: Rows) -> bool:
    """Returns whether the last part's tilt or charge changes with the others' rows or allowances.

    The calls have the same shapes, because other shapes round differently.
    """
    paid, tilts = set(), []
    for others in (rows[:-1], np.roll(rows[:-1], 1, axis=1)):
        for granted in (WHOLE, 0):
            given = np.array([*[granted] * len(others), WHOLE // mechanism.tokens])
            asked = answers(public[None], np.concatenate([others, rows[-1:]])[None], given[None])
            assert asked.allowances is not None
            sums, charges = mechanism.tilts(asked.ratios[None], asked.public, asked.allowances)
            paid.add(int(charges[0, -1]))
            tilts += [] if granted else [sums]  # the others are silent
    return len(paid) > 1 or not torch.equal(*tilts)


@pytest.mark.parametrize(("tokens", "epsilon"), [(1, 2.0), (64, 0.5), (1024, 8.0), (131_072, 8.0)])
def test_sound_accounts_hold(tokens: int, epsilon: float) -> None:
    assert account_faults(tokens, epsilon) == []


TILTS = Individual.tilts
Tilted = tuple[torch.Tensor, torch.Tensor]


def charging_less(*given: Any) -> Tilted:
    """The tokens do not change, so that neither they nor the formula show it."""
    sums, charges = TILTS(*given)
    return sums, (charges * 0.95).long()


def by_the_loudest(self: Individual, ratios: torch.Tensor, public: torch.Tensor, allowances: torch.Tensor) -> Tilted:
    loudest = (ratios - 1).abs().amax(dim=(1, 2))[:, None]
    return TILTS(self, ratios, public, (allowances / (1 + loudest)).long())


def never_silent(self: Individual, ratios: torch.Tensor, public: torch.Tensor, allowances: torch.Tensor) -> Tilted:
    sums, charges = TILTS(self, ratios, public, allowances.clamp(min=WHOLE // self.tokens))
    return sums, torch.minimum(charges, allowances.to(charges.device))


@pytest.mark.parametrize(
    ("fault", "tokens", "reason"),
    [
        *((charging_less, tokens, "a token tells 1.05 times as much") for tokens in (64, 1024, 131_072)),
        (by_the_loudest, 1024, "what a part says or pays depends on another part"),
        (never_silent, 1024, "a part whose account is empty changes a token"),
    ],
)
def test_planted_faults_of_accounts_are_found(
    fault: Callable[..., Tilted], tokens: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Individual, "tilts", fault)
    found = account_faults(tokens)
    assert any(each.startswith(reason) for each in found)
    if fault is charging_less:
        assert len(found) == 1
        assert of_releases(IndividualSettings(epsilon=8.0, tokens=tokens).plan(4)) is False


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
    for models in ((0, 1), (0, 2, 1)):  # another order would charge other parts
        asked = Answers(torch.full((1, 2), 0.5), torch.ones(len(models), 2), (models,))
        with pytest.raises(ValueError, match="models must name all 3 parts"):
            protocol(3).distribution(asked)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_accounts_do_not_change_with_the_number_of_parts(epsilon: float) -> None:
    planned = [IndividualSettings(epsilon=epsilon).plan(parts) for parts in (2, 3, 16, 128, 1000)]
    assert len({own.event for own in planned}) == 1
    assert all(own.lower <= own.upper * (1 + 1e-9) for own in planned)
