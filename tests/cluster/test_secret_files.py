"""Claim: each setting that may hold a secret can come from a file, and no message shows what the file holds."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from privmix.foundation.errors import ConfigurationError
from privmix_cluster.configuration import Configuration
from privmix_cluster.secret_files import MAX_BYTES, SECRETS, is_secret, variable

LISTS = {"http.api_keys": ["hunter2", "second"]}
TEXTS = {"budget.signing_key": "k" * 32}


def value(configuration: Configuration, setting: str) -> Any:
    section, name = setting.split(".")
    found = getattr(getattr(configuration, section), name)
    if isinstance(found, tuple):
        return [each.get_secret_value() for each in found]
    return found.get_secret_value() if isinstance(found, SecretStr) else found


@pytest.mark.parametrize("setting", SECRETS)
@pytest.mark.parametrize("by", ["setting", "variable"])
def test_a_secret_comes_from_a_file(setting: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section, name = setting.split(".")
    wanted = LISTS.get(setting) or TEXTS.get(setting, "postgresql://user:hunter2@host/base")
    (tmp_path / "secret").write_text("\n".join([wanted] if isinstance(wanted, str) else wanted) + "\n")
    values: dict[str, Any] = {"ensemble": "here"}
    if by == "setting":
        values[section] = {f"{name}_file": "secret"}
    else:
        monkeypatch.setenv(f"PRIVMIX_{section}__{name}_FILE".upper(), str(tmp_path / "secret"))
    configuration = Configuration.of(values, tmp_path)
    assert value(configuration, setting) == wanted
    assert is_secret(setting)


def test_a_variable_has_precedence_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first").write_text("sqlite-first.db")
    (tmp_path / "second").write_text("postgresql://host/second")
    values = {"ensemble": "here", "budget": {"ledger_file": "first"}, "http": {"api_keys_file": None}}
    configuration = Configuration.of(values, tmp_path)
    assert configuration.budget.ledger == str(tmp_path / "sqlite-first.db")
    monkeypatch.setenv("PRIVMIX_BUDGET__LEDGER_FILE", "second")
    assert Configuration.of(values, tmp_path).budget.ledger == "postgresql://host/second"
    monkeypatch.delenv("PRIVMIX_BUDGET__LEDGER_FILE")
    monkeypatch.setenv("PRIVMIX_BUDGET__LEDGER", "postgresql://host/third")
    assert Configuration.of(values, tmp_path).budget.ledger == "postgresql://host/third"


def test_a_list_may_be_json(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text('["hunter2", "second"]')
    configuration = Configuration.of({"ensemble": "e", "http": {"api_keys_file": "keys"}}, tmp_path)
    assert value(configuration, "http.api_keys") == ["hunter2", "second"]


@pytest.mark.parametrize(
    ("values", "content", "named"),
    [
        ({"http": {"api_keys_file": "missing"}}, b"", "http.api_keys_file: .*missing cannot be read"),
        ({"http": {"api_keys_file": "secret"}}, b" \n", "http.api_keys_file: .* has no text"),
        ({"http": {"api_keys_file": "secret"}}, b"hunter2\xff", "http.api_keys_file: .* not UTF-8"),
        ({"http": {"api_keys_file": "secret"}}, b'["hunter2"', "http.api_keys_file: .* not a JSON list"),
        ({"http": {"api_keys_file": "secret"}}, b'["hunter2", 3]', "http.api_keys.1: .*string"),
        ({"budget": {"ledger_file": "secret"}}, b"SQLite\0hunter2", "budget.ledger_file: .* has no text"),
        ({"budget": {"ledger_file": "secret"}}, b"hunter2" * MAX_BYTES, "budget.ledger_file: .* has more than"),
        ({"budget": {"ledger_file": "secret", "ledger": "a"}}, b"hunter2", "budget.ledger: give it or .*, not both"),
        ({"budget": {"signing_key": ["hunter2"]}}, b"", "budget.signing_key"),
        ({"shards": {"count_file": "secret"}}, b"3", "shards.count_file: there is no such key"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_its_content_is_not_shown(
    values: dict[str, Any], content: bytes, named: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigurationError, match=named) as refused:
        Configuration.of({"ensemble": "here", **values}, tmp_path)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"), [("hunter2", r"http\.api_keys: .*tuple"), ("[hunter2", "API_KEYS: write a list")]
)
def test_a_variable_that_is_no_list_is_refused_without_its_value(
    monkeypatch: pytest.MonkeyPatch, text: str, named: str
) -> None:
    monkeypatch.setenv("PRIVMIX_HTTP__API_KEYS", text)
    with pytest.raises(ConfigurationError, match=named) as refused:
        Configuration.of({"ensemble": "here"})
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_commands_read_the_same_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("postgresql://host/base\n")
    assert variable("PRIVMIX_KEYS__DATABASE") is None
    monkeypatch.setenv("PRIVMIX_KEYS__DATABASE_FILE", str(tmp_path / "url"))
    assert variable("PRIVMIX_KEYS__DATABASE") == "postgresql://host/base"
    monkeypatch.setenv("PRIVMIX_KEYS__DATABASE", "keys.db")
    with pytest.raises(ConfigurationError, match="not both"):
        variable("PRIVMIX_KEYS__DATABASE")
