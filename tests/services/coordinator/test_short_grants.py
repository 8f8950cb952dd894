"""Claim: where a ledger grants fewer tokens than a step has sequences, only the paid ones are sampled."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from privmix.budget.client import Reservation
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.coordinator import Coordinator
from privmix.coordinator.messages import Generation
from privmix.coordinator.step import Step
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.pmixed import PMixed
from privmix.training import public_model
from tests.support.offline import offline

PROTOCOL, ANSWERS, GRANTED = PMixed(2, 1.0, 0.4), 3, 1
TERMS = PrivacyBudget(ensemble="e", epsilon=1e3, delta=1e-5, order=4.0, adjacency="user")


async def sampled(ledger: Path) -> int:
    """Returns the number of tokens that a coordinator samples for answers of one token."""
    coordinator, samples, _ = offline(Coordinator, PROTOCOL, TERMS, ledger, public_model.resolve())
    answers = [Generation(f"{at}", (504, 253 + at), SamplingOptions(), 1) for at in range(ANSWERS)]
    await coordinator.submit("channel", answers)
    while await coordinator.load():
        await asyncio.sleep(0)
    await coordinator.close()
    return samples.tokens


def test_a_grant_that_is_cut_short_pays_for_its_own_tokens_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut(*_: object) -> int:
        return GRANTED

    monkeypatch.setattr(Reservation, "charge", cut)
    assert asyncio.run(sampled(tmp_path / "ledger.db")) == GRANTED < ANSWERS


def test_a_part_of_a_step_has_the_allowances_of_its_own_sequences() -> None:
    allowances = np.arange(6).reshape(3, 2)
    draws = ((0,), (1,), (0, 1))
    step = Step(("a", "b", "c", "d"), ((1,),) * 4, (1,) * 4, (None,) * 4, (SamplingOptions(),) * 4, draws, allowances)
    part = step.of([1, 2, 3])
    assert part.sequences == ("b", "c", "d") and part.draws == draws[1:]
    assert part.allowances is not None and (part.allowances == allowances[1:]).all()
