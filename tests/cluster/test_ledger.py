"""Claim: `privmix ledger` verifies, creates and corrects a ledger."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import Result

from privmix.budget.filter import Filter
from privmix.budget.ledger import Ledger
from privmix.budget.reading import read
from privmix.budget.receipt import anchors_of
from privmix.budget.signing import SigningKey
from privmix.foundation.errors import Fenced, LedgerRolledBack
from privmix_cluster.checks import check_ensemble
from privmix_cluster.configuration import Configuration
from tests.running import configure, own_ensemble
from tests.services.budget.events import COARSE as EVENT
from tests.services.budget.tampering import tamper
from tests.support.cli import privmix, reported
from tests.support.terms import CLINIC as TERMS


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "ledger.db")


@pytest.fixture
def ledger(place: str) -> Ledger:
    """A ledger of five rows: 1 terms, 2 epoch, 3 lease, 4 settle, 5 lease."""
    ledger = Ledger.create(place, TERMS)
    ledger.settle(ledger.lease(EVENT, 10).lease, 4)
    ledger.lease(EVENT, 20)
    return ledger


def run(*arguments: str) -> Result:
    return privmix("ledger", *arguments)


def test_a_ledger_is_verified_beside_its_writer(ledger: Ledger, place: str) -> None:
    found = reported("ledger", "verify", place)
    checked = {"chain": True, "head": False, "signature": False}
    state = {"rows": 5, "head": ledger.balance().head, "epoch": 1}
    assert found == {"valid": True, **state, "checked": checked, "signed_with": None}
    assert ledger.lease(EVENT, 1).count == 1, "it does not fence the writer"


def test_the_first_bad_row_is_named(ledger: Ledger, place: str) -> None:
    """`tests/services/budget/test_chain.py` changes rows in other ways."""
    tamper(Path(place), "DELETE FROM privmix_ledger WHERE seq = 2")
    told, refused = "row 2 is missing", run("verify", place)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert told in refused.stderr
    assert place in refused.stderr
    found = run("verify", place, "--json")
    assert found.exit_code == 1
    assert (json.loads(found.stdout)["valid"], told in json.loads(found.stdout)["error"]) == (False, True)


def test_missing_last_rows_are_detected_with_a_noted_head(ledger: Ledger, place: str, tmp_path: Path) -> None:
    noted, short = ledger.balance().head, shutil.copy(place, str(tmp_path / "short.db"))
    tamper(Path(short), "DELETE FROM privmix_ledger WHERE seq = 5")
    assert run("verify", short).exit_code == 0, "the chain alone cannot show missing last rows"
    ledger.lease(EVENT, 1)
    for head in (noted, noted[:16].upper()):
        refused = run("verify", short, "--head", head)
        assert (refused.exit_code, "no row has the hash" in refused.stderr) == (1, True)
        assert run("verify", place, "--head", head).exit_code == 0, "rows added later are accepted"
    assert "--head" in run("verify", place, "--head", "abc").stderr


def test_a_ledger_is_begun_by_a_command_and_only_once(ensemble: Path, tmp_path: Path) -> None:
    own = own_ensemble(ensemble, tmp_path)
    config = str(configure(tmp_path, own))
    began = run("init", "--config", config)
    assert began.exit_code == 0
    assert "Created ledger" in began.stdout
    told = reported("ledger", "init", "--config", config)
    assert (told["new"], told["id"], told["ledger"]) == (False, read(told["ledger"]).id, str(tmp_path / "ledger.db"))
    (tmp_path / "ledger.db").unlink()
    refused = run("init", "--config", config)
    assert refused.exit_code == 1
    assert "put it back" in refused.stderr
    assert not (tmp_path / "ledger.db").exists()


def test_tokens_lost_since_a_backup_are_forfeited(ledger: Ledger, place: str, ensemble: Path, tmp_path: Path) -> None:
    forfeited = run("forfeit", "--config", str(configure(tmp_path, own_ensemble(ensemble, tmp_path))), "--tokens", "30")
    assert forfeited.exit_code == 0
    assert "30 tokens are charged" in forfeited.stdout
    left = Filter(TERMS).affordable({EVENT: 54}, EVENT)
    assert f"{left} tokens are left" in forfeited.stdout
    assert read(place).charged == {EVENT: 54}
    with pytest.raises(Fenced):
        ledger.lease(EVENT, 1)


def test_a_rolled_back_ledger_is_not_served_until_its_tokens_are_forfeited(ensemble: Path, tmp_path: Path) -> None:
    own, copy = own_ensemble(ensemble, tmp_path), tmp_path / "copy.db"
    config = configure(tmp_path, own)
    assert run("init", "--config", str(config)).exit_code == 0
    configured = Configuration.load(config)
    place, terms = configured.budget.ledger, read(configured.budget.ledger).terms
    shutil.copy(place, copy)
    Ledger.open(place, terms, anchors=anchors_of(own)).lease(EVENT, 5)
    shutil.copy(copy, place)
    with pytest.raises(LedgerRolledBack, match="privmix ledger forfeit"):
        check_ensemble(configured)
    forfeited = run("forfeit", "--config", str(config))
    assert forfeited.exit_code == 0, forfeited.output
    assert "5 tokens are charged now, 5 in all" in forfeited.stdout
    assert check_ensemble(configured).ledger == read(place).id
    refused = run("forfeit", "--config", str(config))
    assert refused.exit_code == 2
    assert "--tokens" in refused.stderr


def test_verify_says_what_it_checked(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 32)
    Ledger.create(place, TERMS).lease(EVENT, 10)
    assert "It is not signed" in run("verify", place).stdout
    refused = run("verify", place, "--signing-key-file", str(key))
    assert refused.exit_code == 1
    assert "no row of it was signed" in refused.stderr
    Ledger.create(place, TERMS, key=SigningKey(b"k" * 32)).lease(EVENT, 10)
    assert "which was not checked: give the key" in run("verify", place).stdout
    assert "signed all of it" in run("verify", place, "--signing-key-file", str(key)).stdout
    monkeypatch.setenv("PRIVMIX_BUDGET__SIGNING_KEY", "k" * 32)
    assert "signed all of it" in run("verify", place).stdout
    checked = reported("ledger", "verify", place)
    assert checked["checked"] == {"chain": True, "head": False, "signature": True}
    assert checked["signed_with"] == SigningKey(b"k" * 32).name
    monkeypatch.setenv("PRIVMIX_BUDGET__SIGNING_KEY", "o" * 32)
    wrong = json.loads(run("verify", place, "--json").stdout)
    assert not wrong["valid"]
    assert "signed with the key" in wrong["error"]


def test_the_key_of_a_deployment_signs_its_ledger_from_the_configuration(tmp_path: Path, ensemble: Path) -> None:
    own = own_ensemble(ensemble, tmp_path)
    (tmp_path / "key").write_text("k" * 32)
    config = configure(tmp_path, own, budget={"ledger": "ledger.db", "signing_key_file": "key"})
    created = run("init", "--config", str(config))
    assert created.exit_code == 0, created.output
    signed = run("verify", str(tmp_path / "ledger.db"), "--signing-key-file", str(tmp_path / "key"))
    assert signed.exit_code == 0, signed.output
