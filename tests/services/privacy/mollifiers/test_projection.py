"""Claim: clip returns the KL-closest member of the ball; mix keeps the largest share that fits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy.optimize import minimize

from privmix.privacy.mollifiers.projection import TOLERANCE, clip, mix

Row = NDArray[np.float64]
RADII = st.floats(0.01, 3)


def distributions(tokens: int) -> st.SearchStrategy[Row]:
    logits = arrays(np.float64, tokens, elements=st.floats(-20, 0))
    return logits.map(lambda x: np.exp(x) / np.exp(x).sum())


def projected(p: Row, p0: Row, radius: float, project=clip) -> Row:  # type: ignore[no-untyped-def]
    return np.asarray(project(torch.tensor(p / p0)[None].float(), torch.tensor(p0).float(), radius)[0].double())


def kl(p: Row, r: Row) -> float:
    kept = p > 0
    return float(np.sum(p[kept] * np.log(p[kept] / r[kept])))


@settings(max_examples=60)
@given(st.data(), st.integers(2, 6), RADII)
def test_no_solver_finds_a_closer_member_of_the_ball(data: st.DataObject, tokens: int, radius: float) -> None:
    p, p0 = data.draw(distributions(tokens)), data.draw(distributions(tokens))
    r = projected(p, p0, radius)
    low, high = np.exp(-radius) * p0, np.exp(radius) * p0
    solved = minimize(
        lambda x: -np.sum(p * np.log(x * p0)),
        np.ones(tokens),
        jac=lambda x: -p / x,
        bounds=[(np.exp(-radius), np.exp(radius))] * tokens,
        constraints={"type": "eq", "fun": lambda x: x @ p0 - 1, "jac": lambda x: p0},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 300},
    )
    other = np.clip(solved.x * p0, low, high)
    assert kl(p, r / r.sum()) <= kl(p, other / other.sum()) + 1e-5


@settings(max_examples=100)
@given(st.data(), st.integers(2, 8), RADII)
def test_mix_keeps_the_largest_share_that_fits(data: st.DataObject, tokens: int, radius: float) -> None:
    p, p0 = data.draw(distributions(tokens)), data.draw(distributions(tokens))
    u = p / p0
    share = min([1.0, *(np.expm1(radius) / (u[u > 1] - 1)), *(np.expm1(-radius) / (u[u < 1] - 1))])
    np.testing.assert_allclose(projected(p, p0, radius, mix), (1 + share * (u - 1)) * p0, rtol=1e-4, atol=1e-9)


def test_a_part_without_mass_where_the_public_model_has_nearly_all() -> None:
    """No scale brings the sum to 1. The result is the limit of a vanishing p_i, and still the closest member."""
    p0, p = np.array([0.9, 0.05, 0.05]), np.array([0.0, 1.0, 0.0])
    r = projected(p, p0, 1.0)
    low, high = np.exp(-1.0) * p0, np.exp(1.0) * p0
    np.testing.assert_allclose(r[1], high[1], rtol=1e-5)
    assert r.sum() == pytest.approx(1, abs=2 * TOLERANCE)
    assert np.all((r >= low * (1 - 1e-6)) & (r <= high * (1 + 1e-6)))


@pytest.mark.exact
def test_a_part_without_mass_does_not_change_other_parts() -> None:
    """Uses a part whose scale is so large that a floor under its own ratios would be visible."""
    p0 = torch.tensor([0.9, 0.06, 0.04])
    easy = torch.tensor([2.0**-62, 2.0**-66, 25.0])
    hopeless = torch.tensor([0.0, 1 / 0.06, 0.0])
    alone = clip(easy[None], p0, 1.0)
    assert torch.equal(clip(torch.stack([easy, hopeless]), p0, 1.0)[0], alone[0])
