"""Claim: a counter grants what exact composition allows, and no change of events makes it grant more."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from privmix.budget.filter import Filter, counted
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.statement import statement
from privmix.budget.token_counter import TokenCounter
from privmix.foundation.errors import LedgerMismatch
from privmix.privacy import accounting
from privmix.privacy.accounting import counting
from privmix.privacy.accounting.channel import WorstCaseRatios
from privmix.privacy.events import Accountant, Event
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.gnmax import GNMaxSettings
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import PMixedSettings, RatioEvent
from privmix.privacy.protocols.subsample_aggregate import SubsampleAggregateSettings
from privmix.privacy.settings import Settings

DELTA = 1e-5
BY_ORDER = Accountant(4.0)  # of a ledger without a counter
EVENT = PMixedSettings().plan(64, BY_ORDER).event
SCALED = PMixedSettings().plan(48, BY_ORDER).event


def budget(settings: Settings, parts: int = 64) -> PrivacyBudget:
    protocol = settings.plan(parts, BY_ORDER)
    return counted(PrivacyBudget.of("ensemble", settings, protocol), protocol.event)


@pytest.fixture(scope="module")
def terms() -> PrivacyBudget:
    return budget(PMixedSettings())


def exact_delta(event: RatioEvent, tokens: int, epsilon: float) -> float:
    """Returns the hockey-stick divergence of the composed worst pair, which has the losses l, 0 and -l."""
    worst = WorstCaseRatios.of(event.parts, event.q, event.radius)
    up, down, loss = worst.mass * worst.high, worst.mass * worst.low, worst.largest_loss
    moved = np.arange(tokens + 1)
    chances = binom.pmf(moved, tokens, up + down)  # of the tokens whose loss is not 0
    total = 0.0
    for count, chance in zip(moved, chances, strict=True):
        ups = np.arange(count + 1)
        losses = (2 * ups - count) * loss
        excess = np.maximum(0.0, -np.expm1(epsilon - losses))
        total += chance * float(binom.pmf(ups, count, up / (up + down)) @ excess)
    return total


def test_sixty_four_parts_get_1156_tokens_and_not_1024(terms: PrivacyBudget) -> None:
    assert isinstance(EVENT, RatioEvent) and terms.counter is not None
    by_order = Filter(terms.model_copy(update={"counter": None}))
    assert by_order.affordable({}, EVENT) == 1024
    assert Filter(terms).affordable({}, EVENT) == terms.counter.tokens == 1156
    assert exact_delta(EVENT, 1156, 8.0) <= DELTA * (1 - 2**-8) < exact_delta(EVENT, 1157, 8.0)
    assert exact_delta(EVENT, 1158, 8.0) > DELTA
    assert counting.epsilon(EVENT, 1024, DELTA, {}) == pytest.approx(7.435, abs=2e-3)


@pytest.mark.parametrize(("epsilon", "counts"), [(60.0, True), (70.0, False)])
def test_a_large_epsilon_keeps_the_filter(epsilon: float, counts: bool) -> None:
    """A grid of losses up to an epsilon of thousands would fill the ledger's memory."""
    terms = budget(PMixedSettings(epsilon=epsilon, tokens=64), 3)
    assert (terms.counter is not None) == counts


@pytest.mark.parametrize("spent", [0, 1, 1023, 1024, 1155, 1156, 1157])
def test_neighbours_of_the_number(terms: PrivacyBudget, spent: int) -> None:
    assert Filter(terms).affordable({EVENT: spent}, EVENT) == max(0, 1156 - spent)
    assert Filter(terms).affordable({EVENT: spent}, EVENT, 1) == min(1, max(0, 1156 - spent))
    assert (Filter(terms).epsilon({EVENT: spent}) <= 8) == (spent <= 1156)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        (ExponentialSettings(), None),  # its symmetric pair costs 8.85 for 1,024 tokens
        (ExponentialSettings(sample=8), None),
        (GNMaxSettings(), None),  # measured
        (IndividualSettings(), None),  # has accounts
        (PMixedSettings(epsilon=None, radius=1.0), None),
        (PMixedSettings(tokens=16384), None),  # a radius at which no input attains the pair at every epsilon
        (SubsampleAggregateSettings(), 1117),
        (PMixedSettings(tokens=1), 1),
    ],
    ids=repr,
)
def test_the_better_of_both(settings: Settings, tokens: int | None) -> None:
    counter = budget(settings).counter
    assert (counter and counter.tokens) == (None if tokens == 1 else tokens)


@pytest.mark.parametrize(
    "settings",
    [PMixedSettings(), PMixedSettings(tokens=1), PMixedSettings(tokens=16384), SubsampleAggregateSettings(tokens=64)],
    ids=repr,
)
def test_a_new_ledger_grants_what_was_planned_and_little_more(settings: Settings) -> None:
    """A plan takes the better of both, so that no budget is left over for tokens that nobody asked for."""
    protocol = settings.plan(64)
    new = counted(PrivacyBudget.of("ensemble", settings, protocol), protocol.event, settings.planned)
    assert settings.tokens <= Filter(new).affordable({}, protocol.event) <= settings.tokens * 1.002
    assert Filter(new).epsilon({protocol.event: settings.tokens}) <= settings.budget
    assert settings.plan(64, new.accountant) == protocol, "a service that starts again serves the same tokens"
    assert settings.plan(64, BY_ORDER).event.rdp([2.0])[0] <= protocol.event.rdp([2.0])[0]


def test_a_kept_ledger_plans_other_numbers_anew() -> None:
    settings = PMixedSettings(tokens=64, epsilon=1.0)
    protocol = settings.plan(8)
    kept = counted(PrivacyBudget.of("ensemble", settings, protocol), protocol.event, settings.planned).accountant
    longer = PMixedSettings(tokens=128, epsilon=1.0)
    assert longer.plan(8, kept) == longer.plan(8)
    assert settings.plan(9, kept) == settings.plan(9)
    chosen = PMixedSettings(tokens=64, epsilon=1.0, radius=0.1)
    by_hand = counted(PrivacyBudget.of("ensemble", chosen, chosen.plan(8)), chosen.plan(8).event, chosen.planned)
    assert settings.plan(8, by_hand.accountant).radius != 0.1


def test_a_private_base_counts_too() -> None:
    base = DpSgdEvent("user", 40.0, 1.0, 100)
    protocol = PMixedSettings(radius=0.5).plan(64)
    plain = PrivacyBudget.of("ensemble", PMixedSettings(radius=0.5), protocol)
    with_base = plain.model_copy(update={"base": base.to_json()})
    alone, both = (counted(terms, protocol.event).counter for terms in (plain, with_base))
    assert alone is not None and both is not None
    assert both.tokens < alone.tokens
    most = counting.epsilon(protocol.event, both.tokens, DELTA, {base: 1})
    assert most <= 8 < counting.epsilon(protocol.event, both.tokens + 1, DELTA, {base: 1})
    # One release, beside which no block is bought: all of delta is its own.
    kept = counted(with_base, protocol.event)
    assert Filter(kept).epsilon({}) == Filter(with_base).epsilon({}) == accounting.pld_epsilon({base: 1}, DELTA)


def test_another_number_of_parts_pays_in_blocks(terms: PrivacyBudget) -> None:
    counts, counter = Filter(terms), terms.counter
    assert counter is not None and counter.block(SCALED) == 72
    price = counting.price(SCALED, 72, EVENT, 1156, DELTA)
    assert price is not None and 72 <= price <= 76
    assert counter.used({EVENT: 500, SCALED: 1}, DELTA) == counter.used({EVENT: 500, SCALED: 72}, DELTA) == 500 + price
    assert counts.affordable({EVENT: 500}, SCALED) == (656 // price) * 72
    assert counts.affordable({EVENT: 1156}, SCALED) == 0, "what was granted before the change stays charged"
    assert counts.affordable({EVENT: 1156 - price, SCALED: 70}, SCALED) == 2
    assert counts.affordable({EVENT: 1156 - price, SCALED: 72}, EVENT) == 0
    assert counts.affordable({}, ExponentialSettings().plan(64).event) < 1024, "what dominates it costs more"


@pytest.mark.parametrize(("most", "price"), [(2, 1), (8, 2)])
def test_a_block_adds_its_share_of_the_margin_and_no_more(most: int, price: int) -> None:
    """The other event costs the same at order 2, and more at some epsilons: 0.28 of the whole margin."""
    unit, other, delta = RatioEvent(2, 1.0, 0.6), RatioEvent(2, 0.9, 0.606685), 0.1464
    assert other.rdp([2.0])[0] < unit.rdp([2.0])[0]
    assert counting.price(other, 1, unit, most, delta) == price
    epsilons = np.linspace(0, 1, 101)
    excess = [exact_delta(other, 1, epsilon) - exact_delta(unit, price, epsilon) for epsilon in epsilons]
    assert max(excess) <= delta * 2**-8 * price / most
    assert (
        price == 1 or max(exact_delta(other, 1, e) - exact_delta(unit, 1, e) for e in epsilons) > delta * 2**-8 / most
    )


def test_events_without_a_pair_are_refused(terms: PrivacyBudget) -> None:
    with pytest.raises(ValueError, match=r"no privacy loss distribution .* the ledger counts tokens of RatioEvent"):
        Filter(terms).affordable({}, IndividualSettings().plan(64).event)


def worst_delta(affordable: Callable[[Mapping[Event, int]], list[RatioEvent]], epsilon: float) -> float:
    """Returns the largest delta of an adversary who chooses each event after seeing the earlier tokens, and may stop.

    It tries all choices after all outcomes of the worst pairs: the value of a likelihood ratio x = P/Q is
    ``max(x - e^epsilon, 0)`` at the end, and before it the largest mean under Q over the events that may follow.
    """

    def value(ratio: float, spent: Mapping[Event, int]) -> float:
        best = max(0.0, ratio - math.exp(epsilon))
        for event in affordable(spent):
            worst = WorstCaseRatios.of(event.parts, event.q, event.radius)
            change, rest = worst.high / worst.low, 1 - worst.mass * (worst.high + worst.low)
            after = Counter(spent) + Counter({event: 1})
            outcomes = ((worst.mass * worst.low, change), (worst.mass * worst.high, 1 / change), (rest, 1.0))
            best = max(best, sum(mass * value(ratio * factor, after) for mass, factor in outcomes))
        return best

    return value(1.0, {})


SMALL = [
    (RatioEvent(2, 1.0, 0.6), RatioEvent(3, 1.0, 1.1), 1.5, 5),
    (RatioEvent(3, 1.0, 1.0), RatioEvent(3, 1.0, 0.5), 1.2, 4),
    (RatioEvent(4, 0.5, 1.5), RatioEvent(2, 0.7, 0.8), 1.0, 5),
]


@pytest.mark.parametrize(("first", "second", "epsilon", "tokens"), SMALL, ids=repr)
def test_no_adversary_who_changes_events_gets_more_than_delta(
    first: RatioEvent, second: RatioEvent, epsilon: float, tokens: int
) -> None:
    delta = exact_delta(first, tokens, epsilon) * 1.01
    counter = TokenCounter(event=first.to_json(), tokens=tokens)
    terms = PrivacyBudget(ensemble="e", epsilon=epsilon, delta=delta, order=2, adjacency="user", counter=counter)
    counts = Filter(terms)

    def affordable(spent: Mapping[Event, int]) -> list[RatioEvent]:
        return [event for event in (first, second) if counts.affordable(spent, event, 1)]

    worst = worst_delta(affordable, epsilon)
    assert exact_delta(first, tokens, epsilon) * (1 - 1e-9) <= worst <= delta
    assert counts.affordable({}, second), "the other event is reached"

    def cheaper(spent: Mapping[Event, int]) -> list[RatioEvent]:
        """Plants a fault: a token of the other event costs one token of the first."""
        return [first, second] if sum(spent.values()) < tokens else []

    if exact_delta(second, tokens, epsilon) > delta:
        assert worst_delta(cheaper, epsilon) > delta, "the search finds a price that is too low"


def test_the_ledger_keeps_the_number_through_restarts_and_refuses_another(tmp_path: Path, terms: PrivacyBudget) -> None:
    place = tmp_path / "ledger.db"
    ledger = Ledger.create(place, terms)
    assert ledger.lease(EVENT, 1100).count == 1100
    again = Ledger.open(place, terms)
    assert again.lease(SCALED, 5).count == 0, "a block of 72 does not fit into the 56 that are left"
    assert again.lease(EVENT, 100).count == 56
    stated = statement(again.balance())
    assert (stated.tokens_left, stated.exhausted) == (0, True)
    assert "up to 1156 released tokens, (8, 1e-05)" in stated.guarantee
    assert stated.epsilon_bound is not None and 7.99 < stated.epsilon_bound <= 8
    with pytest.raises(LedgerMismatch, match="counter"):
        Ledger.open(place, terms.model_copy(update={"counter": None}))
    with pytest.raises(LedgerMismatch, match="counter"):
        Ledger.create(place, terms.model_copy(update={"counter": TokenCounter(event=EVENT.to_json(), tokens=2000)}))
