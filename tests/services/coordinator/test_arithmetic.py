"""Claim: a step has the same result with any number of threads, and every sequence gets its own answer."""

import asyncio

import numpy as np
import pytest
import torch

from privmix.coordinator.arithmetic import Arithmetic
from privmix.coordinator.raw_rows import RawRows
from privmix.coordinator.step import Step
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.pmixed import PMixed

VOCABULARY = 1000
DRAWN = (2, 1, 0, 3, 1, 1)
PUBLIC = 1
"""Sequences after those with a draw, which the public model alone answers."""
SEQUENCES = len(DRAWN) + PUBLIC


def rows(threads: int) -> RawRows:
    values = torch.log_softmax(torch.randn(SEQUENCES + sum(DRAWN), VOCABULARY, generator=torch.Generator()), dim=1)
    log_p = list(values.numpy())
    draws = tuple(tuple(range(count)) for count in DRAWN)
    step = Step(
        sequences=tuple(map(str, range(SEQUENCES))),
        contexts=((),) * SEQUENCES,
        lengths=(0,) * SEQUENCES,
        cache_salts=(None,) * SEQUENCES,
        options=tuple(SamplingOptions(top_k=1 + index) for index in range(SEQUENCES)),
        draws=draws,
    )
    arithmetic = Arithmetic(threads, "cpu")
    return RawRows(step, len(values), 0, arithmetic, PMixed(4, 0.5, 0.4), log_p[:SEQUENCES], log_p[SEQUENCES:])


@pytest.mark.exact
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_share_the_sequences(threads: int) -> None:
    async def run() -> None:
        result, alone = rows(threads), rows(1)
        await result.mix()
        await alone.mix()
        pending, (whole,) = result._pending, alone._pending
        assert len(pending) == min(threads, SEQUENCES)
        weights = [chunk.weights for chunk in pending if chunk.weights is not None]
        assert whole.weights is not None
        assert torch.equal(torch.cat(weights), whole.weights)
        assert torch.equal(torch.cat([chunk.public for chunk in pending]), whole.public)
        everyone = range(SEQUENCES)
        for granted in (0, 3, len(DRAWN)):
            paid = everyone[:granted]
            free = everyone[granted:]
            for left_out in (range(0), everyone[::2]):
                wanted = [[index for index in places if index not in left_out] for places in (paid, free)]
                tokens = await result.sample(*wanted)
                assert sorted(tokens) == sorted(wanted[0] + wanted[1])
                assert left_out or tokens[0] == int(np.argmax(result.public[0])), (
                    "with top_k 1 the first sequence gets its most likely token"
                )
                for index, token in tokens.items():
                    assert token in np.argsort(result.public[index])[-(result.step.options[index].top_k or 0) :]

    asyncio.run(run())
