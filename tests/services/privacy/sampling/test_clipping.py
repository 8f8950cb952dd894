"""Claim: clipped vectors have at most the clip's length in whole numbers, and noise is rounded to their grid."""

import math

import pytest
import torch

from privmix.foundation.units import MIN_CLIP
from privmix.privacy.sampling.clipping import GRAINS, clipped, noised


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 0.3, 1.0, 7.0, 1e12, 1e37])
@pytest.mark.parametrize("clip", [MIN_CLIP, 1e-6, 1.0, 3.0])
def test_no_vector_is_longer_than_the_clip(scale: float, clip: float) -> None:
    """In exact arithmetic, for vectors whose squares overflow or underflow in float32, and on the border."""
    random = torch.Generator().manual_seed(0)
    vectors = scale * torch.randn(20, 300, generator=random)
    vectors[0] = (vectors[0].double() / vectors[0].double().norm() * clip).float()
    for vector in (*vectors, scale * torch.eye(300)[0]):
        grains = clipped(vector, clip)
        length = math.isqrt(sum(int(grain) ** 2 for grain in grains))
        assert length < GRAINS
        wanted = vector.double() * min(1.0, clip / float(vector.double().norm()))
        assert float((grains.double() * (clip / GRAINS) - wanted).norm()) < 2e-6 * clip
        assert torch.equal(grains, clipped(vector, clip))


def test_a_vector_that_is_not_finite_counts_as_zero() -> None:
    vectors = torch.tensor([[1.0, math.inf], [math.nan, 0.0], [3.0, 4.0]])
    grains = clipped(vectors, 1.0)
    assert not grains[:2].any()
    assert grains[2].any()


@pytest.mark.parametrize("vectors", [torch.zeros(3, dtype=torch.float64), torch.zeros(1, 2**26 + 1, device="meta")])
def test_what_the_proof_does_not_cover_is_refused(vectors: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="vectors must be float32"):
        clipped(vectors, 1.0)


@pytest.mark.parametrize("clip", [0.0, 1e-310, 1e-299, MIN_CLIP / 2, math.inf, math.nan])
def test_a_clip_whose_scale_overflows_is_refused(clip: float) -> None:
    """Zero times an infinite scale is not a number, and as an integer 2^32 clips."""
    with pytest.raises(ValueError, match="clip must be"):
        clipped(torch.zeros(2, 4), clip)


def test_noise_is_a_whole_number_of_grains() -> None:
    """Sums that differ by whole grains can release the same numbers: the lowest bits tell nothing."""
    total = torch.tensor([12345678901, -7, 0])
    released = noised(total, 1.5) * (1.5 * GRAINS)
    assert torch.equal(released, released.round())
