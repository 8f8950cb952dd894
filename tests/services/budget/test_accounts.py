"""Claim: each part has one account, from which leases set amounts aside and to which tokens are charged for ever."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privmix.budget.accounts import NO_ACCOUNTS, Accounts
from privmix.budget.filter import UNLIMITED
from privmix.budget.ledger import CHECKPOINT_ROWS, Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read, verify
from privmix.budget.statement import statement
from privmix.foundation.errors import LeaseRefused, LedgerMismatch
from privmix.laboratory.evaluation.in_memory import InMemoryBudget
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.individual import HEADROOM, WHOLE, IndividualSettings

PARTS = 3
HORIZON = 2048
SETTINGS = IndividualSettings(tokens=HORIZON)
EVENT = SETTINGS.plan(PARTS).event


@pytest.fixture(scope="module")
def terms() -> PrivacyBudget:
    return PrivacyBudget.of("clinic", SETTINGS, SETTINGS.plan(PARTS), partition="salt", parts=5)


def test_a_lease_holds_its_allowances_and_settling_keeps_the_charges(ledger: Ledger, place: str) -> None:
    grant = ledger.lease(EVENT, 8, "first", PARTS)
    assert (grant.count, len(grant.allowances)) == (8, PARTS)
    assert set(grant.allowances) == {HEADROOM * WHOLE // math.ceil(HORIZON * 8 / 7)}, "an eighth is kept for later"
    assert read(place).accounts.held == tuple(8 * own for own in grant.allowances)
    assert ledger.lease(EVENT, 8, "first", PARTS) == grant, "Ray repeats calls"
    for _ in range(2):
        ledger.settle("first", 5, (7, 0, 5 * grant.allowances[2]))
    assert read(place).accounts == Accounts((7, 0, 5 * grant.allowances[2]), (0, 0, 0))
    assert read(place).charged == {EVENT: 5}
    assert read(place) == ledger.balance()


@pytest.mark.parametrize(
    ("used", "charges"), [(1, ()), (1, (1, 1)), (1, (-1, 0, 0)), (1, (2**36, 0, 0)), (0, (1, 0, 0)), (9, (0, 0, 0))]
)
def test_charges_beyond_the_allowances_are_refused(
    ledger: Ledger, place: str, used: int, charges: tuple[int, ...]
) -> None:
    ledger.lease(EVENT, 8, "first", PARTS)
    before = read(place)
    with pytest.raises(LeaseRefused):
        ledger.settle("first", used, charges)
    assert read(place) == before, "the lease stays charged in full"


def test_a_lost_client_forfeits_what_its_lease_holds(ledger: Ledger, place: str, terms: PrivacyBudget) -> None:
    """A restart resets no account."""
    held = ledger.lease(EVENT, 8, "lost", PARTS).allowances
    again = Ledger.create(place, terms)
    assert again.balance().accounts.held == tuple(8 * own for own in held)
    assert again.lease(EVENT, 8, "next", PARTS).count == 8
    again.settle("lost", 2, (1, 1, 1))  # its client lives on
    assert again.balance().accounts.charged == (1, 1, 1)


def test_an_account_never_pays_more_than_it_holds_and_no_lease_is_refused(ledger: Ledger) -> None:
    """All tokens charge the most that they may, far beyond the horizon."""
    for number in range(3 * HORIZON // 32):
        grant = ledger.lease(EVENT, 32, str(number), PARTS)
        assert grant.count >= 1
        ledger.settle(str(number), grant.count, tuple(grant.count * own for own in grant.allowances))
        if number % 16 == 0:
            assert max(ledger.balance().accounts.charged) <= WHOLE
    assert min(ledger.balance().accounts.charged) > 0.95 * WHOLE, "the parts fade"
    spent = statement(ledger.balance())
    assert (spent.exhausted, spent.stopped, spent.tokens_left) == (False, False, None)
    assert ledger.filter.affordable(ledger.balance().charged, EVENT) == UNLIMITED


@pytest.mark.parametrize("share", [0.04, 0.15, 0.8])
def test_an_account_lasts_for_its_horizon_and_fades_after_it(share: float) -> None:
    """The pace follows what a part charges of its allowances; then what is left falls with the number of tokens."""
    accounts, horizon, spent, left = NO_ACCOUNTS, 1024, {}, {}
    for token in range(1, 16 * horizon + 1):
        (allowance,) = accounts.allowances(1, token - 1, horizon, 1)
        accounts = accounts.settle((), (int(share * allowance),))
        spent[token], left[token] = int(share * allowance), accounts.left(0)
    for times in (1, 2, 4, 8, 16):
        assert left[times * horizon] == pytest.approx(WHOLE / 8 / times, rel=0.45)
        assert spent[times * horizon] > 0
    assert spent[horizon - 1] > 0.4 * spent[horizon // 8], "tokens just before the horizon are not starved"


grains = st.integers(0, WHOLE)


@given(
    st.lists(st.tuples(grains, grains), min_size=2, max_size=2),
    grains,
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.integers(1, 5000),
)
@settings(max_examples=300)
def test_an_allowance_depends_on_the_part_itself_and_all_tokens_of_a_lease_are_affordable(
    accounts: list[tuple[int, int]], other: int, tokens: int, horizon: int, wanted: int
) -> None:
    (charged, held), (other_charged, other_held) = accounts
    own = Accounts((charged, other_charged), (held, other_held))
    count, allowances = own.divide(2, tokens, horizon, wanted)
    assert 1 <= count <= wanted
    assert all(0 <= count * most <= own.left(part) for part, most in enumerate(allowances))
    changed = Accounts((charged, other), (held, 0))
    assert changed.divide(2, tokens, horizon, wanted)[1][0] == allowances[0]


def test_new_parts_begin_with_a_full_account_and_others_go_on_with_what_is_left(ledger: Ledger) -> None:
    first = ledger.lease(EVENT, 8, "few", 2)
    ledger.settle("few", 8, tuple(8 * own for own in first.allowances))
    grown = SETTINGS.plan(5)
    assert grown.event == EVENT, "accounts are in units of loss, whatever the number of parts"
    grant = ledger.lease(grown.event, 8, "more", 5)
    assert len(set(grant.allowances[2:])) == 1
    assert grant.allowances[0] < grant.allowances[2]
    ledger.settle("more", 8, grant.allowances)
    assert len(ledger.lease(EVENT, 8, "fewer", 2).allowances) == 2
    assert len(ledger.balance().accounts.charged) == 5


def test_a_checkpoint_keeps_the_accounts(ledger: Ledger, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privmix.budget.ledger.CHECKPOINT_ROWS", 6)
    assert CHECKPOINT_ROWS > 6
    for number in range(10):
        grant = ledger.lease(EVENT, 4, str(number), PARTS)
        if number != 3:
            ledger.settle(str(number), 4, tuple(own // 3 for own in grant.allowances))
    balance = ledger.balance()
    assert read(place).accounts == balance.accounts == verify(place).accounts


def test_a_ledger_of_another_protocol_or_horizon_is_refused(place: str, ledger: Ledger, tmp_path: Path) -> None:
    other = PROTOCOLS["pmixed"].model_validate({"tokens": HORIZON})
    counters = PrivacyBudget.of("clinic", other, other.plan(PARTS))
    with pytest.raises(LedgerMismatch, match="horizon is 2048 there and None here"):
        Ledger.create(place, counters)
    longer = SETTINGS.model_copy(update={"tokens": 4096})
    with pytest.raises(LedgerMismatch, match="horizon is 2048 there and 4096 here"):
        Ledger.create(place, PrivacyBudget.of("clinic", longer, longer.plan(PARTS)))
    with pytest.raises(LeaseRefused, match="need the number of parts that are served and a ledger"):
        Ledger.create(tmp_path / "counters.db", counters).lease(EVENT, 8, None, PARTS)
    with pytest.raises(LeaseRefused, match="need the number of parts"):
        ledger.lease(EVENT, 8)


def test_clients_and_the_public_statement_learn_nothing_of_accounts(ledger: Ledger) -> None:
    untouched = statement(ledger.balance()).client()
    assert not [name for name in untouched.model_dump() if "account" in name]
    statements = []
    for charges in ((1, 1, 1), (0, 0, 10**6)):
        name = f"lease {charges}"
        before = ledger.balance()
        ledger.lease(EVENT, 8, name, PARTS)
        ledger.settle(name, 8, charges)
        told = statement(ledger.balance()).client().model_dump()
        statements.append({**told, "tokens_charged": told["tokens_charged"] - sum(before.charged.values())})
    assert statements[0] == statements[1]


def test_an_evaluation_divides_accounts_like_the_ledger(ledger: Ledger, terms: PrivacyBudget) -> None:
    budget = InMemoryBudget(terms, EVENT)
    for number in range(24):
        count, allowances = budget.allowances(PARTS, 16)
        grant = ledger.lease(EVENT, 16, str(number), PARTS)
        assert (grant.count, grant.allowances) == (count, allowances)
        charges = (count * allowances[0], count * allowances[1] // HEADROOM, 0)
        ledger.settle(grant.lease, count, charges)
        budget.charge_accounts(count, charges)
