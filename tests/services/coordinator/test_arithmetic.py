"""Claim: a step has the same result with any number of threads, and every sequence gets its own answer."""

import asyncio
from itertools import accumulate

import numpy as np
import pytest
import torch

from services.coordinator.arithmetic import Arithmetic
from services.coordinator.ensemble import Rows
from services.privacy.mollifiers.shaping import SamplingOptions
from services.privacy.protocols.pmixed import PMixed

VOCABULARY = 1000
DRAWN = (2, 1, 0, 3, 0, 1, 1)
PRIVATE = (True, True, True, True, False, True, True)
OPTIONS = [SamplingOptions(top_k=1 + index) for index in range(len(DRAWN))]


@pytest.fixture
def rows() -> Rows:
    values = torch.log_softmax(torch.randn(len(DRAWN) + sum(DRAWN), VOCABULARY, generator=torch.Generator()), dim=1)
    log_p = list(values.numpy())
    models = tuple(tuple(range(count)) for count in DRAWN)
    return Rows(log_p[: len(DRAWN)], log_p[len(DRAWN) :], models, PRIVATE, len(values), 0)


@pytest.mark.exact
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_share_the_sequences(rows: Rows, threads: int) -> None:
    async def run() -> None:
        arithmetic, alone = Arithmetic(threads, "cpu"), Arithmetic(1, "cpu")
        protocol = PMixed(4, 0.5, 0.4)
        pending, (whole,) = (
            await arithmetic.distributions(protocol, rows, OPTIONS),
            await alone.distributions(protocol, rows, OPTIONS),
        )
        assert len(pending) == min(threads, len(DRAWN))
        weights = [piece.weights for piece in pending if piece.weights is not None]
        assert whole.weights is not None
        assert torch.equal(torch.cat(weights), whole.weights)
        firsts = accumulate((len(piece.public) for piece in pending), initial=0)
        private = [first + index for first, piece in zip(firsts, pending, strict=False) for index in piece.private]
        assert tuple(private) == whole.private
        everyone = range(len(DRAWN))
        for granted in (0, 3, len(private)):
            paid = private[:granted]
            free = [index for index in everyone if index not in paid]
            for left_out in (range(0), everyone[::2]):
                wanted = [[index for index in places if index not in left_out] for places in (paid, free)]
                tokens = await arithmetic.sample(pending, *wanted)
                assert sorted(tokens) == sorted(wanted[0] + wanted[1])
                assert left_out or tokens[0] == int(np.argmax(rows.public[0])), (
                    "with top_k 1 the first sequence gets its most likely token"
                )
                for index, token in tokens.items():
                    assert token in np.argsort(rows.public[index])[-(OPTIONS[index].top_k or 0) :]

    asyncio.run(run())
