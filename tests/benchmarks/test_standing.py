"""Claim: the rows of few parts that stand for all give the distribution of all, and charge each account the same."""

from dataclasses import asdict

import numpy as np
import torch

from privmix.laboratory.evaluation.trial import WINDOWS, TrialResult
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocols.individual import IndividualSettings
from tests.benchmarks.fading import gains, mixed, planned
from tests.benchmarks.gain import RADII
from tests.benchmarks.standing import FewRows

STANDING, PARTS, POSITIONS, VOCABULARY = 2, 8, 3, 50


def test_few_rows_release_what_all_do() -> None:
    noise = torch.Generator().manual_seed(0)
    public = torch.randn(POSITIONS, VOCABULARY, generator=noise).log_softmax(1)
    rows = (public[:, None] + torch.randn(POSITIONS, STANDING, VOCABULARY, generator=noise)).log_softmax(2)
    everybody = rows.repeat_interleave(PARTS // STANDING, dim=1)
    protocol = IndividualSettings(epsilon=8, tokens=64).plan(PARTS)
    whole = protocol.distribution(shape(public, everybody.flatten(0, 1), [protocol.draw()] * POSITIONS))
    few = FewRows(**asdict(protocol), standing=STANDING)
    released = few.distribution(shape(public, rows.flatten(0, 1), [few.draw()] * POSITIONS))
    # Sums in another order round otherwise.
    assert torch.allclose(whole.weights.double(), released.weights.double(), rtol=1e-6)
    assert whole.charges is not None
    assert released.charges is not None
    charges = released.charges.repeat_interleave(PARTS // STANDING, dim=1)
    assert torch.allclose(whole.charges.double(), charges.double(), rtol=1e-6)


def test_a_radius_is_planned() -> None:
    for radius in RADII:
        _, protocol = FewRows.at(radius, STANDING)
        assert isinstance(protocol, FewRows)
        assert abs(protocol.radius / radius - 1) < 0.01


def test_a_run_is_compared_window_by_window_in_a_mixed_order() -> None:
    order = mixed(np.arange(96))
    assert sorted(order) == list(range(96))
    assert np.abs(np.diff(order)).min() > 16, "neighbours are far apart in the text"
    assert list(planned(8.0, 1600, PARTS, STANDING)) == [
        "public",
        "individual, horizon 1,600",
        "individual, horizon 100",
        "exponential",
    ]

    def outcome(loss: float, counts: list[int]) -> TrialResult:
        windows = tuple((count, count * loss) for count in counts)
        return TrialResult(96, 96, 96, 96, loss, 0.2, 2.0, 8.0, windows=windows)

    full = [12] * WINDOWS
    assert gains(outcome(3.5, full), outcome(4.0, full)) == [0.5] * WINDOWS
    assert gains(outcome(3.5, [11, *full[1:]]), outcome(4.0, full))[0] is None
