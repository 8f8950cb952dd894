"""Claim: a ledger charges measured losses on disk before a token's release, sums them up, and stops for ever."""

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privmix.budget.filter import NO_LOSSES, Filter, Losses
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.budget.statement import Statement, statement
from privmix.foundation.errors import LeaseRefused
from privmix.privacy import accounting
from privmix.privacy.protocols.gnmax import GNMaxEvent
from privmix.privacy.protocols.submix import SubMixEvent
from tests.services.budget.conftest import known
from tests.services.budget.events import COARSE

PARTS = 3
SUBMIX = SubMixEvent(parts=PARTS, order=8.0, beta=0.01)
GNMAX = GNMaxEvent(parts=8, sigma=20.0)


@pytest.fixture
def ledger(place: str, measured: PrivacyBudget) -> Ledger:
    return Ledger.create(place, measured)


def epsilon(terms: PrivacyBudget, loss: float) -> float:
    return accounting.epsilon([loss], terms.delta, [terms.order]).epsilon  # type: ignore[arg-type]


def test_losses_are_on_disk_before_their_tokens_are_granted(ledger: Ledger, place: str) -> None:
    assert ledger.charge(SUBMIX, [[0.1, 0.2, 0.3], [0.5, 0.0, 0.1]], "first") == 2
    on_disk = read(place)
    assert on_disk.charged == {SUBMIX: 2}
    assert on_disk.losses.parts == pytest.approx((0.6, 0.2, 0.4))
    assert on_disk == ledger.balance()


@given(st.lists(st.lists(st.floats(0, 1e3), min_size=PARTS, max_size=PARTS), max_size=50))
@settings(max_examples=50)
def test_sums_of_losses_are_never_too_small(tokens: list[list[float]]) -> None:
    total = NO_LOSSES
    for losses in tokens:
        total = total.plus(losses)
    for part, charged in enumerate(total.parts):
        exact = math.fsum(token[part] for token in tokens)
        assert exact <= charged <= exact * (1 + 1e-12) + 1e-300


def test_losses_are_summed_for_each_part() -> None:
    total = NO_LOSSES.plus([0.5]).plus([1.0, 2.0]).plus([0.25, 0.25, 4.0])
    assert total.alike == 0.5
    assert total.parts == pytest.approx((1.25, 2.25, 4.0))
    assert total.largest == pytest.approx(4.5), "new parts of a larger ensemble have a full budget"
    assert Losses().largest == 0


def test_a_token_that_exceeds_the_budget_stops_the_ledger_for_ever(
    ledger: Ledger, place: str, measured: PrivacyBudget
) -> None:
    room = next(count for count in range(10**4) if epsilon(measured, 0.5 * (count + 1)) > known(measured.epsilon))
    assert ledger.charge(SUBMIX, [[0.5, 0.1, 0.0]] * (room + 3), "all") == room
    assert ledger.charge(SUBMIX, [[0.0, 0.0, 0.0]], "free") == 0, "an affordable token would reveal private losses, too"
    assert ledger.lease(COARSE, 1).count == 0
    again = Ledger.create(place, measured)
    assert again.balance().stopped
    assert again.charge(SUBMIX, [[0.0, 0.0, 0.0]], "later") == 0
    assert read(place).charged == {SUBMIX: room}
    assert Filter(measured).epsilon({}, read(place).losses) <= known(measured.epsilon)


def test_an_infinite_loss_is_refused(ledger: Ledger) -> None:
    assert ledger.charge(SUBMIX, [[0.1, 0.1, 0.1], [0.1, math.inf, 0.1], [0.1, 0.1, 0.1]], "first") == 1
    assert ledger.balance().stopped


def test_a_repeated_charge_is_made_once(ledger: Ledger, place: str, measured: PrivacyBudget) -> None:
    assert ledger.charge(SUBMIX, [[0.1, 0.2, 0.3]], "mine") == 1
    assert Ledger.create(place, measured).charge(SUBMIX, [[0.1, 0.2, 0.3]], "mine") == 1
    assert read(place).charged == {SUBMIX: 1}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "at least 1"), ([[]], "losses"), ([[0.1], [-0.1]], "negative"), ([[math.nan]], "losses")],
)
def test_invalid_losses_are_refused(ledger: Ledger, tokens: list[list[float]], message: str) -> None:
    with pytest.raises(LeaseRefused, match=message):
        ledger.charge(SUBMIX, tokens, "first")
    assert not ledger.balance().charged


def test_leases_and_charges_refuse_each_others_events(ledger: Ledger) -> None:
    with pytest.raises(LeaseRefused, match="leased, not charged"):
        ledger.charge(COARSE, [[0.1]], "first")
    with pytest.raises(LeaseRefused, match="charge it then"):
        ledger.lease(SUBMIX, 1)


def test_protocols_share_one_budget(ledger: Ledger, measured: PrivacyBudget) -> None:
    """One protocol releases half of the tokens, another the other half, with more parts."""
    ledger.charge(SUBMIX, [[0.5, 0.1, 0.1]] * 4, "first")
    granted = ledger.lease(COARSE, 10_000)
    ledger.settle(granted.lease, 50)
    assert ledger.charge(SubMixEvent(5, 8.0, 0.01), [[0.1, 0.1, 0.1, 0.1, 0.4]], "second") == 1
    balance = ledger.balance()
    (cost,) = COARSE.rdp([measured.order])
    total = 50 * cost + 4 * 0.5 + 0.1
    assert statement(balance).epsilon_measured == pytest.approx(epsilon(measured, total), abs=1e-3)
    alone = Filter(measured).affordable({}, COARSE)
    assert granted.count < alone


def test_losses_are_only_recorded_if_the_bound_is_enforced(place: str, terms: PrivacyBudget) -> None:
    ledger = Ledger.create(place, terms)
    allowance = Filter(terms).affordable({}, GNMAX)
    assert ledger.charge(GNMAX, [[0.001]] * (allowance + 5), "all") == allowance
    assert not ledger.balance().stopped
    assert ledger.charge(GNMAX, [[0.0]], "more") == 0
    stated = statement(ledger.balance())
    assert known(stated.epsilon_measured) < known(stated.epsilon_bound) <= known(terms.epsilon)
    assert stated.tokens_left == 0


def test_clients_see_no_measured_losses(ledger: Ledger) -> None:
    ledger.charge(SUBMIX, [[0.1, 0.7, 0.3]] * 5, "first")
    for_clients = statement(ledger.balance()).client()
    assert type(for_clients) is Statement
    assert (for_clients.epsilon_spent, for_clients.epsilon_left, for_clients.tokens_left) == (None,) * 3
    assert not [name for name in for_clients.model_dump() if "measured" in name]
    cheaper = statement(ledger.balance().__class__(**{**vars(ledger.balance()), "losses": NO_LOSSES}))
    assert for_clients == cheaper.client(), "clients see nothing that depends on the losses"
    assert "operational" in for_clients.guarantee


def test_no_epsilon_is_stated_where_clients_see_a_stop_that_depends_on_the_text(
    place: str, measured: PrivacyBudget
) -> None:
    """The analysis of measured losses assumes that nobody sees the stop; here it ends an answer and causes 429."""
    ledger = Ledger.create(place, measured)
    assert ledger.charge(SUBMIX, [[0.1, 0.2, 0.3], [1e9, 0.0, 0.0]], "first") == 1
    operator = statement(ledger.balance())
    told = operator.client()
    assert told.stopped and told.exhausted, "clients see it"
    assert told.epsilon is None
    assert told.guarantee == operator.guarantee
    assert told.guarantee.startswith("No epsilon is stated: clients see when the losses")
    assert operator.epsilon == measured.epsilon, "the operator's limit"


@pytest.mark.parametrize("within", [1, 40])
def test_a_random_stop_comes_after_the_drawn_number_of_tokens(place: str, measured: PrivacyBudget, within: int) -> None:
    terms = measured.model_copy(update={"stop_within": within})
    ledger = Ledger.create(place, terms)
    granted = ledger.charge(SUBMIX, [[0.0, 0.0, 0.0]] * (within + 1), "all")
    assert 0 <= granted < within
    again = Ledger.create(place, terms)
    assert again.balance().stopped
    assert again.charge(SUBMIX, [[0.0, 0.0, 0.0]], "more") == 0


def test_random_stops_are_uniform_over_their_range(tmp_path: Path, measured: PrivacyBudget) -> None:
    terms = measured.model_copy(update={"stop_within": 3})
    stops = Counter(
        Ledger.create(tmp_path / f"{n}.db", terms).charge(SUBMIX, [[0.0] * 3] * 4, "all") for n in range(60)
    )
    assert set(stops) == {0, 1, 2}
