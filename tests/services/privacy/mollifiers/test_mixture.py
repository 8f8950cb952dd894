"""Claim: released distributions lie in the ball, in the arithmetic that the service uses (README, Theorem 1).

The tests compare weights as integers of any size; only e^c is rounded, to a double.
"""

import math
import re
from fractions import Fraction
from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from privmix.privacy.mollifiers.mixture import integer_weights
from privmix.privacy.mollifiers.projection import Projection, clip
from privmix.privacy.mollifiers.shaping import SUPPORT_FLOOR, SamplingOptions, shape
from privmix.privacy.protocols import exponential, pmixed
from privmix.privacy.protocols.adapmixed import AdaPMixed
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.pmixed import PMixed
from tests.services.privacy.mechanism import Rows, released
from tests.support.rows import PARTS, PUBLIC, VOCABULARY, part_logits, public_logits

Integers = NDArray[np.object_]


def logs(public: Tensor, parts: Tensor) -> tuple[Rows, Rows]:
    return public.log_softmax(dim=0).numpy(), parts.log_softmax(dim=1).numpy()


def outside(numerators: Integers, denominator: int, public: Integers, radius: float) -> int:
    """Counts the tokens of numerators / denominator outside the ball around the distribution public / sum(public)."""
    low, high = Fraction(exp(-radius)), Fraction(exp(radius))
    of_public, total = public * denominator, public.sum()
    below = numerators * total * low.denominator < of_public * low.numerator
    above = numerators * total * high.denominator > of_public * high.numerator
    return int((below | above).sum())


@pytest.mark.parametrize("projection", ["clip", "mix"])
@pytest.mark.parametrize("radius", [0.002, 0.4, 1.6, 5.0])
@pytest.mark.parametrize("kind", PUBLIC)
def test_every_released_token_keeps_to_the_ball(kind: str, radius: float, projection: Projection) -> None:
    generator = torch.Generator().manual_seed(PUBLIC.index(kind))
    public = public_logits(kind, generator)
    parts = torch.stack([part_logits(part, public, generator) for part in PARTS])
    protocol = PMixed(len(PARTS), 0.5, radius, projection=projection)
    models = [(), *((part,) for part in range(len(PARTS)))]
    nothing_drawn, *drawn = released(protocol, *logs(public, parts), models)
    for weights in drawn:
        assert outside(weights, weights.sum(), nothing_drawn, radius) == 0


@pytest.mark.parametrize("projection", ["clip", "mix"])
@pytest.mark.parametrize("radius", [0.01, 1.6, 4.0])
def test_the_contribution_of_a_part_to_a_mean_keeps_to_the_ball(radius: float, projection: Projection) -> None:
    """The analysis attributes (m+1) P(S'+i) - m P(S') to part i, so rounding of the mean counts m times."""
    generator = torch.Generator().manual_seed(0)
    public = public_logits("at the floor", generator)
    parts = torch.stack([part_logits(PARTS[i % len(PARTS)], public, generator) for i in range(60)])
    protocol = AdaPMixed(len(parts), projection=projection, radius=radius, threshold=math.inf)
    models = [(), *(tuple(range(count)) for count in (1, 2, 3, 4, 5, 59, 60))]
    nothing_drawn, *drawn = released(protocol, *logs(public, parts), models)
    for m, without, present in zip((1, 2, 3, 4, 59), (*drawn[:4], drawn[5]), (*drawn[1:5], drawn[6]), strict=True):
        added = (m + 1) * present * without.sum() - m * without * present.sum()
        assert outside(added, present.sum() * without.sum(), nothing_drawn, radius) == 0


@pytest.mark.parametrize("kind", PUBLIC)
def test_without_slack_rounding_leaves_the_ball(kind: str) -> None:
    """Shows the power of the tests above: the same code with a projection to the radius itself fails them."""
    generator = torch.Generator().manual_seed(PUBLIC.index(kind))
    public = public_logits(kind, generator)
    parts = torch.stack([part_logits(part, public, generator) for part in PARTS])
    models = [(), *((i,) for i in range(len(PARTS)))]
    answers = shape(public.log_softmax(dim=0).expand(len(models), -1), parts.log_softmax(dim=1), models)
    nothing_drawn, *drawn = integer_weights(answers, lambda u, p0, drawn, out: clip(u, p0, 1.6)).numpy().astype(object)
    assert sum(outside(weights, weights.sum(), nothing_drawn, 1.6) for weights in drawn) > 0


@pytest.mark.exact
def test_the_public_model_replaces_a_row_that_is_not_a_distribution() -> None:
    public = torch.tensor([0.5, 0.25, 0.25])
    answers = shape(public.log()[None], public.log().expand(2, 3), [(0, 1)], SamplingOptions())
    good, bad = torch.tensor([0.25, 0.25, 0.5]), torch.tensor([0.25, 0.25, 0.6])
    weights = integer_weights(answers, lambda ratios, p0, drawn, out: torch.stack([good, bad]))
    assert torch.equal(weights[0], ((good + public) / 2 * 2.0**61).long())


@pytest.mark.exact
def test_public_weights_are_exact() -> None:
    logits = public_logits("steep", torch.Generator().manual_seed(1))
    answers = shape(logits[None], torch.empty(0, VOCABULARY), [()], SamplingOptions())
    assert bool((answers.public == 0).any()), "some tokens fall below the floor"
    assert float(answers.public[answers.public > 0].min()) >= SUPPORT_FLOOR * (1 - 1e-6)
    weights = PMixed(3, 0.5, 1.0).distribution(answers).weights
    assert torch.equal(weights.double() / 2.0**61, answers.public.double())


@pytest.mark.parametrize("parts", [1, 80, 5000])
@pytest.mark.parametrize("of", [pmixed, exponential])
def test_little_of_a_radius_is_lost_to_rounding(of: Any, parts: int) -> None:
    low, high = of.radii(parts)
    for radius in np.geomspace(low, high, 20):
        assert of.slack(parts, radius) <= 0.1 * radius * (1 + 1e-6)
    for radius in (low * 0.9, high * 1.1):
        with pytest.raises(ValueError, match=re.escape(f"from {low} to {high}")):  # all digits, so that it is true
            AdaPMixed(parts, radius=radius) if of is pmixed else Exponential(parts, parts, radius)
