"""Claim: releases from real models' rows lie in the ball, in exact integer arithmetic."""

from fractions import Fraction
from math import exp
from pathlib import Path

import pytest
import torch

from privmix.engine.engine import PUBLIC, EngineSettings, Request, create
from privmix.privacy.mollifiers.projection import Projection
from privmix.privacy.mollifiers.shaping import SamplingOptions, shape
from privmix.privacy.protocols.pmixed import PMixed
from privmix.privacy.sampling.categorical import quantise

CASES = (
    (0.05, SamplingOptions()),
    (2.0, SamplingOptions()),
    (0.4, SamplingOptions(temperature=0.3)),
    (0.4, SamplingOptions(temperature=1.7, top_p=0.9)),
    (0.4, SamplingOptions(top_k=50)),
)


@pytest.fixture(scope="module")
def rows(public_model: Path, adapters: dict[str, Path], tokens: tuple[int, ...]) -> torch.Tensor:
    """Returns log-probabilities of real models on real text [positions, 1 + adapters, V]."""
    engine = create(EngineSettings(public_model, "transformers", "bfloat16", 256, adapters=adapters))
    names = (PUBLIC, *adapters)
    return torch.stack([engine.next_token([Request("text", tokens[:n], names)]) for n in range(1, len(tokens), 12)])


@pytest.mark.parametrize("projection", ["clip", "mix"])
@pytest.mark.parametrize(("radius", "options"), CASES)
def test_every_token_of_every_release_stays_in_the_ball(
    rows: torch.Tensor, projection: Projection, radius: float, options: SamplingOptions
) -> None:
    parts = rows.shape[1] - 1
    protocol = PMixed(parts, 1.0, radius, projection=projection)
    models = [(part,) for _ in rows for part in range(parts)]
    answers = shape(rows[:, 0].repeat_interleave(parts, dim=0), rows[:, 1:].flatten(0, 1), models, options)
    released, public = protocol.distribution(answers).weights, quantise(answers.public)
    assert ((released > 0) == (public > 0)).all()
    low, high = Fraction(exp(-radius)), Fraction(exp(radius))
    reached = Fraction(0)
    for ours, theirs in zip(released, public, strict=True):
        kept = theirs > 0
        total = Fraction(int(ours.sum()), int(theirs.sum()))
        # Exact, because the extreme ratios are ratios of integers.
        quotients = ours[kept].double() / theirs[kept].double()
        for index in (quotients.argmin(), quotients.argmax()):
            ratio = Fraction(int(ours[kept][index]), int(theirs[kept][index])) / total
            assert low <= ratio <= high
            reached = max(reached, ratio / high, low / ratio)
    assert reached > Fraction(3, 4) or radius > 1, "the mollifier uses too little of its radius"
