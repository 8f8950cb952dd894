"""Claim: `privmix plan --users` looks its expectation up in measurements, and derives the number of parts."""

from dataclasses import replace

import pytest

from privmix.foundation.errors import InputError
from privmix.privacy.accounting import planning
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.training import expectation
from privmix.training.expectation import Measured, Population, Requirements, candidates, propose
from privmix.training.options import TokenBudget

BUDGET = TokenBudget(epsilon=8.0, delta=1e-5, tokens=100_000)


def test_curves_are_linear_between_measurements_and_constant_beyond() -> None:
    curves = {"a": {"kept": {"pmixed": {"1.0": [0.2, 0.4], "2.0": [0.6, 0.6]}}}}
    measured = Measured({"part_kind": {"reader": {"corpora": curves}}}, "reader")
    assert measured.kept("pmixed", 0.5) == pytest.approx([0.1, 0.2])
    assert measured.kept("pmixed", 1.5) == pytest.approx([0.4, 0.5])
    assert measured.kept("pmixed", 9.0) == [0.6, 0.6]


def test_the_proposed_protocol_keeps_to_the_budget() -> None:
    proposal = propose(Requirements(Population(10_000), BUDGET))
    cost = planning.cost(proposal.protocol.event, BUDGET.tokens, BUDGET.delta)
    assert cost.epsilon <= BUDGET.epsilon
    assert cost.epsilon == pytest.approx(BUDGET.epsilon, rel=1e-3)
    assert proposal.gain is None
    assert 0 < proposal.kept.low <= proposal.kept.mean <= proposal.kept.high


def test_a_smaller_corpus_gets_fewer_parts_because_each_must_learn() -> None:
    budget = TokenBudget(epsilon=8.0, delta=1e-5, tokens=1024)
    large = propose(Requirements(Population(10_000, 100_000_000), budget, "pmixed"))
    small = propose(Requirements(Population(10_000, 50_000), budget, "pmixed"))
    assert small.protocol.parts < large.protocol.parts
    assert small.gain is not None
    assert large.gain is not None
    assert small.gain.mean < large.gain.mean


def test_texts_are_proposed_where_they_are_expected_to_gain_more() -> None:
    budget = TokenBudget(epsilon=8.0, delta=1e-5, tokens=16_384)
    wanted = Requirements(Population(2000, 200_000), budget)
    both = {kind: propose(replace(wanted, part_kind=kind)) for kind in ("reader", "text")}
    worth = {kind: proposal.worth for kind, proposal in both.items()}
    chosen = propose(wanted)
    assert chosen == both["text" if worth["text"] > (1 + expectation.TOLERANCE) * worth["reader"] else "reader"]
    assert chosen.part_kind == "text", "a part of 1,000 tokens or less learns little"
    # The size of the corpus decides. Without it, the gains cannot be compared.
    assert propose(Requirements(Population(2000), budget)).part_kind == "reader"
    assert propose(Requirements(Population(2000), budget, part_kind="text")).part_kind == "text"


def test_a_proposal_of_individual_budgets_has_their_parameters() -> None:
    proposal = propose(Requirements(Population(10_000, 20_000_000), BUDGET, "individual"))
    protocol = IndividualSettings(**BUDGET.model_dump()).plan(proposal.protocol.parts)
    assert proposal.protocol == protocol
    assert proposal.radius == pytest.approx(protocol.parts * (protocol.size / BUDGET.tokens) ** 0.5)
    assert proposal.parameters == {"lower": protocol.lower, "upper": protocol.upper, "account": protocol.size}
    assert proposal.gain is not None
    assert proposal.gain.mean > 0


def test_numbers_of_parts_are_coarse_and_leave_every_part_its_users() -> None:
    assert list(candidates(Population(1))) == [1]
    assert list(candidates(Population(10))) == [2]
    assert list(candidates(Population(350))) == [2, 3, 4, 6, 8, 12]
    assert list(candidates(Population(350))) == list(candidates(Population(351)))
    assert list(candidates(Population(350, 10_000)))[-1] == 32


@pytest.mark.parametrize(
    ("population", "protocol", "parts", "field"),
    [
        (Population(0), None, None, "users"),
        (Population(10, 0), None, None, "corpus-tokens"),
        (Population(10), "gnmax", None, "protocol"),
        (Population(10), None, 11, "parts"),
        (Population(2), "pmixed", 2, "tokens"),
    ],
)
def test_an_impossible_proposal_names_the_field(
    population: Population, protocol: str | None, parts: int | None, field: str
) -> None:
    with pytest.raises(InputError, match=f"^{field}:"):
        propose(Requirements(population, TokenBudget(epsilon=0.01, delta=1e-5, tokens=10**9), protocol, parts))
