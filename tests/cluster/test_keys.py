"""Claim: `privmix keys` works without a service, and a service without keys serves only this machine."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from privmix.budget.ledger import Ledger
from privmix.database.service import ServiceDatabase
from privmix.foundation.errors import ConfigurationError
from privmix_cluster.checks import check_keys, keys_database
from privmix_cluster.configuration import Configuration
from tests.key_store import RequestStore
from tests.postgresql import Server
from tests.support.cli import privmix
from tests.support.terms import CLINIC


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "keys.db")


def keys(*arguments: str, database: str) -> Result:
    return privmix("keys", *arguments, "--database", database)


def test_keys_are_made_listed_limited_rotated_and_revoked(database: str) -> None:
    made = json.loads(keys("create", "team", "--tokens", "500", "--json", database=database).stdout)
    assert made["secret"].startswith("pmx_")
    rotated = json.loads(keys("rotate", "team", "--json", database=database).stdout)
    assert rotated["secret"] != made["secret"]
    assert "live_streams 20" in keys("limit", "team", "--live-streams", "20", database=database).stdout
    assert keys("revoke", "team", database=database).exit_code == 0
    (listed,) = json.loads(keys("list", "--json", database=database).stdout)
    assert listed["key"]["revoked"] is not None
    assert listed["key"]["share"]["live_streams"] == 20
    assert listed["key"]["share"]["tokens"] is None
    table = keys("list", database=database).stdout
    assert "team" in table
    assert made["secret"] not in table


def test_a_secret_is_printed_alone_so_that_a_script_can_take_it(database: str) -> None:
    made = keys("create", "reader", "--days", "7", database=database)
    assert made.stdout.strip().startswith("pmx_")
    assert "\n" not in made.stdout.strip()
    account = RequestStore(ServiceDatabase(database)).account("reader")
    assert account.key.expires is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("revoke", "nobody"), "no key has the name or id 'nobody'"),
        (("create", "team"), "name: a key named 'team' exists already"),
        (("create", ""), "name: String should have at least 1 character"),
        (("limit", "team", "--tokens", "-1"), "tokens"),
        (("limit", "team", "--tokens", "9" * 30), "tokens"),
    ],
)
def test_an_impossible_command_has_a_clear_error(database: str, arguments: tuple[str, ...], said: str) -> None:
    keys("create", "team", database=database)
    refused = keys(*arguments, database=database)
    assert refused.exit_code in (1, 2)
    assert said in refused.output
    assert "Traceback" not in refused.output


def test_a_place_without_keys_is_named(tmp_path: Path) -> None:
    assert "privmix keys create" in keys("list", database=str(tmp_path / "none.db")).output
    assert "there is no directory" in keys("create", "a", database=str(tmp_path / "no" / "keys.db")).output


def configured(folder: Path, **http: Any) -> Configuration:
    return Configuration.of({"ensemble": "ensemble", "http": http}, folder)


def test_a_service_without_keys_serves_this_machine_alone(tmp_path: Path) -> None:
    told: list[str] = []
    check_keys(configured(tmp_path), told.append)
    assert told[0].startswith("WARNING: there are no keys")
    with pytest.raises(ConfigurationError, match=r"http\.host: 0\.0\.0\.0 .*privmix keys create"):
        check_keys(configured(tmp_path, host="0.0.0.0"))
    check_keys(configured(tmp_path, host="0.0.0.0", anonymous=True))


def test_a_service_with_keys_says_nothing_and_serves_everyone_who_has_one(tmp_path: Path) -> None:
    told: list[str] = []
    check_keys(configured(tmp_path, host="0.0.0.0", api_keys=["one"]), told.append)
    RequestStore(ServiceDatabase(tmp_path / "keys.db")).create("team")
    check_keys(configured(tmp_path, host="0.0.0.0"), told.append)
    assert told == []


def test_keys_are_kept_where_the_configuration_says(tmp_path: Path) -> None:
    assert keys_database(configured(tmp_path)) == str(tmp_path / "keys.db")
    named = Configuration.of({"ensemble": "e", "keys": {"database": "other.db"}}, tmp_path)
    assert keys_database(named) == str(tmp_path / "other.db")
    shared = Configuration.of({"ensemble": "e", "budget": {"ledger": "postgresql://host/base"}}, tmp_path)
    assert keys_database(shared) == "postgresql://host/base"


def test_a_service_that_had_keys_does_not_start_without_them(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "ledger.db", CLINIC)
    check_keys(configured(tmp_path))
    Ledger.create(tmp_path / "ledger.db", CLINIC, clients_need_keys=True)
    Ledger.create(tmp_path / "ledger.db", CLINIC)
    for others in ({}, {"api_keys": ["one"]}):
        with pytest.raises(ConfigurationError, match=r"keys\.database: this service had keys"):
            check_keys(configured(tmp_path, **others))


def test_the_command_uses_the_database_that_belongs_to_the_ledger(
    tmp_path: Path, postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pod with only the ledger's URL, it used to make a useless local file."""
    url = postgresql.database()
    monkeypatch.chdir(tmp_path)
    made = privmix("keys", "create", "team", environment={"PRIVMIX_BUDGET__LEDGER": url})
    assert made.exit_code == 0, made.output
    assert not list(tmp_path.iterdir())
    assert RequestStore(ServiceDatabase(url)).account("team").key.name == "team"
    assert privmix("keys", "create", "local").exit_code == 0
    assert [file.name for file in tmp_path.glob("*.db")] == ["keys.db"]
