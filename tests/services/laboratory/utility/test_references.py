"""Claim: the published mechanisms have the sensitivities that their budgets are planned with, and use their parts."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import laplace

from privmix.foundation.errors import InputError
from privmix.laboratory.utility.references import Amin, InvisibleInk, distance, svt_epsilon
from privmix.privacy.accounting import planning
from privmix.privacy.protocols.exponential import FixedSizeExponentialEvent

VOCABULARY, REFERENCES = 12, 4


def neighbours(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns public logits, and those of references of which one is replaced by an extreme or a random one."""
    chance = torch.Generator().manual_seed(seed)
    public = 3 * torch.randn(VOCABULARY, generator=chance, dtype=torch.float64)
    before = public + 4 * torch.randn(REFERENCES, VOCABULARY, generator=chance, dtype=torch.float64)
    after = before.clone()
    extreme = 50 * torch.randint(-1, 2, (VOCABULARY,), generator=chance)
    after[0] = extreme if seed % 2 else 10 * torch.randn(VOCABULARY, generator=chance, dtype=torch.float64)
    before[0] = -after[0] if seed % 3 else before[0]
    return public, before, after


def log_range(before: torch.Tensor, after: torch.Tensor) -> float:
    """Returns the width of the interval of the log-ratios of two distributions on the same tokens."""
    assert torch.equal(before > 0, after > 0)
    ratios = (before / after)[before > 0].log()
    return float(ratios.max() - ratios.min())


@pytest.mark.parametrize("top_k", [3, VOCABULARY])
def test_invisible_ink_has_the_range_of_the_exponential_mechanism(top_k: int) -> None:
    mechanism = InvisibleInk(clip=0.7, temperature=1.2, top_k=top_k)
    bound = FixedSizeExponentialEvent(REFERENCES, REFERENCES, 0.7 / 1.2).range
    ranges = []
    for seed in range(300):
        public, before, after = neighbours(seed)
        ranges.append(log_range(mechanism.next_token(public, before), mechanism.next_token(public, after)))
    assert 0.95 * bound < max(ranges) <= bound * (1 + 1e-9)


def test_amins_private_token_has_the_same_range() -> None:
    bound = FixedSizeExponentialEvent(REFERENCES, REFERENCES, 0.7 / 1.2).range
    mechanism = Amin(clip=0.7, private_tokens=1, temperature=1.2)
    ranges = [
        log_range(mechanism.private(before), mechanism.private(after))
        for _, before, after in map(neighbours, range(300))
    ]
    assert max(ranges) <= bound * (1 + 1e-9)
    rows = torch.tensor([[0.0, 9.0], [0.0, 0.0]])
    swapped = torch.tensor([[9.0, 0.0], [0.0, 0.0]])
    two = FixedSizeExponentialEvent(2, 2, 0.7 / 1.2).range
    assert log_range(mechanism.private(rows), mechanism.private(swapped)) == pytest.approx(two, rel=1e-5)


def test_the_distance_moves_by_at_most_two_shares_of_a_reference() -> None:
    moves = []
    for seed in range(300):
        public, before, after = neighbours(seed)
        moves.append(abs(distance(public, before) - distance(public, after)))
    assert max(moves) <= 2 / REFERENCES + 1e-12
    public = torch.tensor([0.0, -60.0])
    same, other = torch.tensor([[0.0, -60.0]]), torch.tensor([[-60.0, 0.0]])
    others = same.repeat(REFERENCES - 1, 1)
    moved = distance(public, torch.cat([other, others])) - distance(public, torch.cat([same, others]))
    assert moved == pytest.approx(2 / REFERENCES)


@pytest.mark.parametrize("sigma", [0.2, 1.0])
def test_above_threshold_keeps_its_epsilon_in_runs_of_public_tokens(sigma: float) -> None:
    """The chance of public tokens and then a private one, by integration over the noise of the threshold."""

    def log_chance(distances: list[float]) -> float:
        def integrand(noise: float) -> float:
            below = [laplace.cdf((0.5 + noise - each) / (2 * sigma)) for each in distances]
            return float(laplace.pdf(noise / sigma) / sigma * np.prod(below[:-1]) * (1 - below[-1]))

        return math.log(quad(integrand, -30 * sigma, 30 * sigma, points=[0.0], limit=400)[0])

    move = 2 / REFERENCES
    pairs = [
        ([0.5] * 6, [0.5 + move] * 5 + [0.5 - move]),
        ([0.0] * 3, [move] * 3),
        ([1.0, 2.0], [1.0 + move, 2 - move]),
    ]
    losses = [abs(log_chance(before) - log_chance(after)) for before, after in pairs]
    assert max(losses) <= svt_epsilon(REFERENCES, sigma)
    assert max(losses) > svt_epsilon(REFERENCES, sigma) / 4


def test_the_planned_clip_costs_the_whole_budget() -> None:
    planned = InvisibleInk.plan(16, 256, 8.0, 1e-5, temperature=1.1)
    event = FixedSizeExponentialEvent(16, 16, planned.clip / 1.1)
    assert planning.cost(event, 256, 1e-5).epsilon_rdp == pytest.approx(8, abs=1e-4)
    alone = InvisibleInk.plan(200, 32, 8.0, 1e-5, temperature=1.0)
    assert Amin.plan(200, 32, 8.0, 1e-5, sigma=0.2).clip < alone.clip
    assert Amin.plan(200, 32, 8.0, 1e-5, sigma=1e6).clip == pytest.approx(alone.clip, rel=1e-3)
    with pytest.raises(InputError, match="does not last for 32 tokens of 4 references"):
        Amin.plan(4, 32, 2.0, 1e-5)


def test_top_k_plus_extends_the_public_top_k_and_is_public() -> None:
    mechanism = InvisibleInk(clip=1.0, top_k=2)
    public = torch.tensor([3.0, 2.0, 1.6, 1.4, -5.0])
    assert mechanism.kept(public, REFERENCES).tolist() == [True, True, True, False, False]
    pushed = torch.full((REFERENCES, 5), -50.0)
    pushed[:, 4] = 50.0
    assert (mechanism.next_token(public, pushed) > 0).tolist() == [True, True, True, False, False]


def test_agreeing_references_give_public_tokens_for_nothing_and_private_ones_end() -> None:
    public = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    same = public.repeat(64, 1)
    quiet = Amin(clip=1.0, private_tokens=2, sigma=1e-4, rng=np.random.default_rng(0))
    for _ in range(50):
        assert quiet.next_token(public, same) == pytest.approx(public.softmax(-1))
    assert quiet.spent == 0
    different = torch.zeros(64, VOCABULARY)
    different[:, int(public.argmin())] = 40.0
    for count in (1, 2):
        assert int(quiet.next_token(public, different).argmax()) == int(public.argmin())
        assert quiet.spent == count
    assert quiet.ended
    with pytest.raises(ValueError, match="spent"):
        quiet.next_token(public, different)
