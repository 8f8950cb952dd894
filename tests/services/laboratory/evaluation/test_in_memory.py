"""Claim: the budget in memory, which evaluations use, grants the same tokens as a ledger on disk."""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from privmix.budget.filter import Filter
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.laboratory.evaluation.in_memory import InMemoryBudget
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols import PROTOCOLS

PARTS = 8
STEPS = (5, 1, 40, 7, 30, 30, 1)


def losses_of_steps(protocol: Protocol) -> list[list[list[float]]]:
    """Returns losses [token][part] of each step, large enough to end the budget before the last step."""
    generator = np.random.default_rng(0)
    return [generator.uniform(0, 0.1, (tokens, protocol.parts)).tolist() for tokens in STEPS]


def limited() -> Iterator[str]:
    """Yields each protocol whose tokens a budget limits. Accounts limit none (`test_accounts`)."""
    for name, settings in PROTOCOLS.items():
        if not settings.one_model and settings.model_fields["protocol"].default != "individual":
            defaults = settings()  # type: ignore[call-arg]
            protocol = defaults.plan(PARTS)
            if not Filter(PrivacyBudget.of("clinic", defaults, protocol)).is_free({}, protocol.event):
                yield name


@pytest.mark.parametrize("name", limited())
def test_both_budgets_grant_the_same_tokens(name: str, tmp_path: Path) -> None:
    settings = PROTOCOLS[name].model_validate({"tokens": 64})
    protocol = settings.plan(PARTS)
    terms = PrivacyBudget.of("clinic", settings, protocol)
    if settings.stop_within is not None:
        terms = terms.model_copy(update={"stop_within": None})  # the ledger would draw a random stop
    ledger, budget = Ledger.create(str(tmp_path / "ledger.db"), terms), InMemoryBudget(terms, protocol.event)
    names = (f"charge-{number}" for number in count())

    def by_ledger(losses: Sequence[Sequence[float]]) -> int:
        if protocol.event.measured:
            return ledger.charge(protocol.event, losses, next(names))
        return ledger.lease(protocol.event, len(losses)).count

    def in_memory(losses: Sequence[Sequence[float]]) -> int:
        granted = budget.reserve(len(losses))
        return budget.charge(losses[:granted])

    granted = [(by_ledger(losses), in_memory(losses)) for losses in losses_of_steps(protocol)]
    assert all(on_disk == here for on_disk, here in granted), granted
    assert sum(here for _, here in granted) == budget.charged == sum(read(ledger.name).charged.values())
    assert granted[0] == (STEPS[0], STEPS[0])
    assert granted[-1] == (0, 0)
