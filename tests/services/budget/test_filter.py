"""Claim: after any spending, the filter grants every token that the budget covers, and none beyond."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mpf

from privmix.budget.filter import UNLIMITED, Filter
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.privacy.events import Event, Orders
from privmix.privacy.protocols.pmixed import RatioEvent
from tests.services.budget.events import COARSE, EVENTS
from tests.support.epsilons import exact_epsilon

all_terms = st.builds(
    PrivacyBudget,
    ensemble=st.just("e"),
    adjacency=st.just("parts"),
    epsilon=st.floats(0.05, 50),
    delta=st.floats(1e-12, 0.5),
    order=st.floats(1.05, 64),
)
all_events = st.one_of(
    st.sampled_from(EVENTS),
    st.builds(RatioEvent, parts=st.integers(1, 40), q=st.floats(0.01, 1), radius=st.floats(1e-4, 3)),
)


@given(all_terms, st.lists(st.tuples(all_events, st.integers(1, 10**6)), max_size=12))
def test_no_sequence_of_grants_exceeds_the_budget(terms: PrivacyBudget, requests: list[tuple[Event, int]]) -> None:
    budget, spent = Filter(terms), Counter[Event]()
    for event, wanted in requests:
        spent[event] += budget.affordable(spent, event, wanted)
    assert exact_epsilon(terms, spent) <= mpf(terms.epsilon)


@given(st.integers(1, 10**4), st.sampled_from(EVENTS), st.floats(2, 32))
def test_a_budget_that_differs_in_the_last_bit_is_not_exceeded(tokens: int, event: Event, order: float) -> None:
    """With rounding to nearest, half of these cases would exceed the budget: their exact epsilon is above the float."""
    terms = PrivacyBudget(ensemble="e", epsilon=1, delta=1e-5, order=order, adjacency="parts")
    terms = terms.model_copy(update={"epsilon": Filter(terms).epsilon({event: tokens})})
    granted = Filter(terms).affordable({}, event)
    assert granted >= tokens - 1
    assert exact_epsilon(terms, {event: granted}) <= mpf(terms.epsilon)


@given(all_terms, all_events, st.dictionaries(all_events, st.integers(0, 50), max_size=3), st.integers(1, 10**9))
def test_a_refused_token_exceeds_the_budget(
    terms: PrivacyBudget, event: Event, spent: dict[Event, int], wanted: int
) -> None:
    assert terms.epsilon is not None
    granted = Filter(terms).affordable(spent, event, wanted)
    assert 0 <= granted <= wanted
    if granted < wanted:
        one_more = {**spent, event: spent.get(event, 0) + granted + 1}
        # dp-accounting returns epsilon 0 if delta alone covers the divergence, which is below the exact conversion.
        assert Filter(terms).epsilon(one_more) > terms.epsilon - 1e-13 * (1 + terms.epsilon)


class PricedEvent(RatioEvent):
    """Costs its radius at every order."""

    kind = "test-priced"

    def __post_init__(self) -> None: ...

    def rdp(self, orders: Orders) -> np.ndarray:
        return np.full(np.size(orders), self.radius)


def test_free_and_unaffordable_events(terms: PrivacyBudget) -> None:
    free, budget = PricedEvent(1, 1.0, 0.0), Filter(terms)
    assert budget.affordable({}, free) == UNLIMITED
    assert budget.affordable({COARSE: budget.affordable({}, COARSE)}, free) == UNLIMITED
    assert budget.affordable({}, PricedEvent(1, 1.0, 1e300)) == 0
    with pytest.raises(ValueError, match="costs inf at order 8"):
        budget.affordable({}, PricedEvent(1, 1.0, np.inf), 1)
