"""Claim: `privmix ledger` exports, verifies, moves, creates and corrects a ledger."""

import json
import re
import shutil
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from privmix.budget import ledger as writing
from privmix.budget.filter import Filter
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reader import read
from privmix.budget.receipt import anchors_of
from privmix.budget.records import KINDS
from privmix.budget.signing import SigningKey
from privmix.foundation.errors import Fenced, LedgerRolledBack
from privmix.privacy.protocols.adapmixed import AdaPMixed
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import RatioEvent
from privmix_cluster.checks import check_ensemble
from privmix_cluster.cli import app
from privmix_cluster.configuration import Configuration
from tests.postgresql import Server
from tests.running import configure, own_ensemble

EVENT = RatioEvent(parts=8, q=0.25, radius=0.4)
TERMS = PrivacyBudget(ensemble="clinic", epsilon=8, delta=1e-5, order=8, adjacency="one part added or removed")


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "ledger.db")
    server: Server = request.getfixturevalue("postgresql")
    return server.database()


@pytest.fixture
def ledger(place: str) -> Ledger:
    """A ledger of five rows: 1 terms, 2 epoch, 3 lease, 4 settle, 5 lease."""
    ledger = Ledger.create(place, TERMS)
    ledger.settle(ledger.lease(EVENT, 10).lease, 4)
    ledger.lease(EVENT, 20)
    return ledger


@pytest.fixture
def file(ledger: Ledger, place: str, tmp_path: Path) -> Path:
    file = tmp_path / "ledger.jsonl"
    assert run("export", place, "--output", str(file)).exit_code == 0
    return file


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["ledger", *arguments])


def test_an_export_has_every_row_in_order_and_can_be_verified_alone(ledger: Ledger, place: str, file: Path) -> None:
    exported = run("export", place)
    assert exported.stdout == file.read_text()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["seq"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["kind"] for line in lines] == ["terms", "epoch", "lease", "settle", "lease"]
    assert [line["previous"] for line in lines[1:]] == [line["hash"] for line in lines[:-1]]
    for what in (place, str(file)):
        found = json.loads(run("verify", what, "--json").stdout)
        checked = {"chain": True, "head": False, "rows": False, "signature": False}
        state = {"rows": 5, "head": ledger.balance().head, "epoch": 1}
        assert found == {"valid": True, **state, "checked": checked, "signed_with": None}
    assert ledger.lease(EVENT, 1).count == 1, "neither fences the writer"


def test_an_export_is_for_its_owner_and_whole(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.read_bytes()
    assert run("export", str(file.with_name("none.db")), "--output", str(file)).exit_code == 1
    assert file.read_bytes() == before
    assert not list(file.parent.glob("*.partial"))


@pytest.mark.parametrize(
    ("pattern", "replacement", "told"),
    [
        (r'\\"count\\":10', r'\\"count\\":11', "row 3 was changed"),
        (r'"seq": 4', '"seq": 9', "row 4 is missing"),
        (r'(?m)^.*"seq": 2.*\n', "", "row 2 is missing"),
        (r'(?m)^.*"seq": 5.*\n', "a letter\n", "line 5 is not a row"),
        (r'"at": "', '"on": "', "line 1 is not a row"),
        (r"(?s)^.{50}", "", "line 1 is not a row"),
    ],
)
def test_the_first_bad_row_is_named(file: Path, pattern: str, replacement: str, told: str) -> None:
    changed = re.sub(pattern, replacement, file.read_text(), count=1)
    assert changed != file.read_text()
    file.write_text(changed)
    refused = run("verify", str(file))
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert told in refused.stderr
    assert str(file) in refused.stderr
    found = run("verify", str(file), "--json")
    assert found.exit_code == 1
    assert (json.loads(found.stdout)["valid"], told in json.loads(found.stdout)["error"]) == (False, True)


def test_missing_last_rows_are_detected_with_a_noted_head(ledger: Ledger, place: str, file: Path) -> None:
    noted = ledger.balance()
    short = file.with_name("short.jsonl")
    short.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    assert run("verify", str(short)).exit_code == 0, "the chain alone cannot show missing last rows"
    for options, told in (
        (["--head", noted.head], "no row has the hash"),
        (["--head", noted.head[:16].upper()], "no row has the hash"),
        (["--rows", "5"], "it had 5 rows and has 4 now"),
        (["--head", noted.head, "--rows", "4"], "row 4 does not have the hash"),
    ):
        refused = run("verify", str(short), *options)
        assert refused.exit_code == 1
        assert told in refused.stderr
    ledger.lease(EVENT, 1)
    for options in (["--head", noted.head], ["--head", noted.head[:16]], ["--rows", "5"]):
        assert run("verify", place, *options).exit_code == 0, "rows added later are accepted"
    assert run("verify", place, "--head", noted.head, "--rows", "5").exit_code == 0
    assert run("verify", place, "--head", noted.head, "--rows", "6").exit_code == 1


@pytest.mark.parametrize("options", [["--head", "abc"], ["--head", "x" * 64], ["--rows", "0"]])
def test_options_that_are_not_a_hash_or_a_number_are_refused(place: str, options: list[str]) -> None:
    refused = run("verify", place, *options)
    assert refused.exit_code == 2
    assert options[0] in refused.stderr


def test_a_ledger_is_begun_by_a_command_and_only_once(ensemble: Path, tmp_path: Path) -> None:
    own = own_ensemble(ensemble, tmp_path)
    config = str(configure(tmp_path, own))
    began = run("init", "--config", config)
    assert began.exit_code == 0
    assert "Created ledger" in began.stdout
    told = json.loads(run("init", "--config", config, "--json").stdout)
    assert (told["new"], told["id"], told["ledger"]) == (False, read(told["ledger"]).id, str(tmp_path / "ledger.db"))
    (tmp_path / "ledger.db").unlink()
    refused = run("init", "--config", config)
    assert refused.exit_code == 1
    assert "put it back" in refused.stderr
    assert not (tmp_path / "ledger.db").exists()


def test_tokens_lost_since_a_backup_are_forfeited(ledger: Ledger, place: str) -> None:
    forfeited = run("forfeit", place, "--tokens", "30")
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
    refused = run("forfeit", place)
    assert refused.exit_code == 2
    assert "--tokens" in refused.stderr
    forfeited = run("forfeit", "--config", str(config))
    assert forfeited.exit_code == 0, forfeited.output
    assert "5 tokens are charged now, 5 in all" in forfeited.stdout
    assert check_ensemble(configured).ledger == read(place).id


def test_a_missing_place_is_reported(tmp_path: Path) -> None:
    for arguments in (["export"], ["verify"]):
        refused = run(arguments[0], str(tmp_path / "none.db"), *arguments[1:])
        assert refused.exit_code == 1
        assert "there is no such file" in refused.stderr
    assert not list(tmp_path.iterdir())


INDIVIDUAL = IndividualSettings(epsilon=8.0, delta=1e-5, tokens=1024)


@pytest.fixture
def accounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger with individual budgets: each lease, settlement and checkpoint holds what parts were charged."""
    monkeypatch.setattr(writing, "CHECKPOINT_ROWS", 4)
    planned = INDIVIDUAL.plan(4)
    ledger = Ledger.create(tmp_path / "accounts.db", PrivacyBudget.of("e", INDIVIDUAL, planned, partition="salt"))
    for used in (1, 2):
        grant = ledger.lease(planned.event, 4, parts=4)
        ledger.settle(grant.lease, used, tuple(SECRET + part for part in range(4)))
    ledger.lease(planned.event, 4, parts=4)
    return tmp_path / "accounts.db"


SECRET = 123_450


def test_an_export_leaves_private_values_out_unless_the_operator_asks_by_name(accounted: Path, tmp_path: Path) -> None:
    """With individual budgets every settlement says what each part was charged, and the help did not say so."""
    lines = [json.loads(line) for line in run("export", str(accounted)).stdout.splitlines()]
    assert {line["kind"] for line in lines if line.get("left_out")} == {"lease", "settle", "checkpoint"}
    for line in lines:
        body = json.loads(line["body"])
        assert not any(body.get(name) for name in KINDS[line["kind"]].private)
        assert not set(line.get("left_out", ())) & body.keys()
        assert not re.search("|".join(str(SECRET + part) for part in range(4)), json.dumps(line))
    first = next(line["seq"] for line in lines if "hash" not in line)
    assert [line["seq"] for line in lines if "hash" in line] == list(range(1, first))
    assert not any("previous" in line for line in lines[first - 1 :]), "a hash would confirm a guess"

    file = tmp_path / "public.jsonl"
    assert run("export", str(accounted), "--output", str(file)).exit_code == 0
    refused = run("verify", str(file))
    assert refused.exit_code == 1
    assert "--private-values" in refused.output
    assert run("export", str(accounted), "--private-values", "--output", str(file)).exit_code == 0
    assert str(SECRET) in file.read_text()
    assert run("verify", str(file)).exit_code == 0


def test_an_export_leaves_measured_losses_out(tmp_path: Path) -> None:
    terms = PrivacyBudget(ensemble="e", epsilon=8, delta=1e-5, order=8, adjacency="one part added or removed")
    ledger = Ledger.create(tmp_path / "measured.db", terms)
    ledger.charge(AdaPMixed(8, radius=0.01).event, [(0.012345,)], "one")
    assert "0.012345" not in run("export", str(tmp_path / "measured.db")).stdout
    assert "0.012345" in run("export", str(tmp_path / "measured.db"), "--private-values").stdout


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
    checked = json.loads(run("verify", place, "--json").stdout)
    assert checked["checked"] == {"chain": True, "head": False, "rows": False, "signature": True}
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
