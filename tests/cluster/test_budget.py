"""Claim: `privmix budget` reads the ledger itself, also while a service writes it."""

from pathlib import Path

import pytest

from privmix.budget.ledger import Ledger
from privmix.privacy.protocols.submix import SubMixEvent
from tests.services.budget.events import COARSE as EVENT
from tests.support.cli import privmix, reported
from tests.support.terms import CLINIC


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger.create(path, CLINIC)


def test_json_reports_the_budget(ledger: Ledger, path: Path) -> None:
    ledger.settle(ledger.lease(EVENT, 60).lease, 50)
    stated = reported("budget", "--ledger", path)
    assert (stated["ensemble"], stated["epsilon"]) == ("clinic", 8.0)
    assert (stated["tokens_charged"], stated["tokens_left"]) == (50, 158)
    assert 0 < stated["epsilon_spent"] <= stated["epsilon_bound"] < 8
    assert stated["charges"] == [{"event": EVENT.as_dict(), "status": "certified", "tokens": 50}]
    assert ledger.lease(EVENT, 1).count == 1, "reading does not fence the writer"


def test_a_missing_ledger_is_reported(path: Path) -> None:
    result = privmix("budget", "--ledger", path)
    assert result.exit_code == 1
    assert "there is no such file" in result.stderr
    assert not path.exists()


def test_only_the_operator_sees_measured_losses(path: Path) -> None:
    event = SubMixEvent(parts=2, order=8.0, beta=0.01)
    terms = CLINIC.model_copy(update={"enforced": "measured"})
    Ledger.create(path, terms).charge(event, [[0.25, 0.5]] * 3, "first")
    told = reported("budget", "--ledger", path)
    assert not [name for name in told if "measured" in name and name != "enforced"]
    assert (told["epsilon_spent"], told["tokens_left"]) == (None, None)
    assert told["guarantee"].startswith("No epsilon is stated")
    stated = reported("budget", "--ledger", path, "--operator")
    assert 1.5 < stated["epsilon_measured"] < 8
    assert stated["epsilon_measured"] + stated["epsilon_measured_left"] == pytest.approx(8)
    shown = privmix("budget", "--ledger", path, "--operator").stdout
    assert f"{stated['epsilon_measured']:.4f}" in shown
    assert "eps(D)" in shown
    assert "eps(D)" not in privmix("budget", "--ledger", path).stdout
