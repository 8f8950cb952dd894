"""Claim: the example shows the defaults, the environment has precedence, and invalid fields are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from privmix.foundation.errors import ConfigurationError
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix_cluster.configuration import Configuration

EXAMPLE = Path(__file__).parents[2] / "cluster" / "privmix.yaml"


def test_the_example_shows_the_defaults() -> None:
    shown = Configuration.load(EXAMPLE)
    defaults = Configuration.of({"ensemble": "./ensemble"}, EXAMPLE.parent)
    assert shown == defaults


def test_paths_are_relative_to_the_file_and_urls_and_hub_ids_are_no_paths(tmp_path: Path) -> None:
    path = tmp_path / "privmix.yaml"
    path.write_text(
        "ensemble: here\nbudget: {ledger: there.db}\nkeys: {database: postgresql://host/base}\nmodel: org/model"
    )
    configuration = Configuration.load(path)
    assert (configuration.ensemble, configuration.model) == (tmp_path / "here", "org/model")
    assert configuration.budget.ledger == str(tmp_path / "there.db")
    assert configuration.keys.database == "postgresql://host/base"


def test_the_environment_has_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "privmix.yaml"
    path.write_text("ensemble: here\nprivacy: {epsilon: 4, q: 0.5}")
    monkeypatch.setenv("PRIVMIX_PRIVACY__EPSILON", "2")
    configuration = Configuration.load(path)
    assert isinstance(configuration.privacy, PMixedSettings)
    assert (configuration.privacy.epsilon, configuration.privacy.q) == (2.0, 0.5)


@pytest.mark.parametrize("section_first", [True, False])
def test_a_variable_of_a_key_overrides_that_of_its_section(
    monkeypatch: pytest.MonkeyPatch, section_first: bool
) -> None:
    variables = [
        ("PRIVMIX_PRIVACY", '{"protocol": "pmixed", "epsilon": 8, "q": 0.5}'),
        ("PRIVMIX_PRIVACY__EPSILON", "2"),
    ]
    for name, text in variables if section_first else reversed(variables):
        monkeypatch.setenv(name, text)
    configuration = Configuration.of({"ensemble": "e"})
    assert isinstance(configuration.privacy, PMixedSettings)
    assert (configuration.privacy.epsilon, configuration.privacy.q) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "ensemble: is missing"),
        ({"ensemble": "e", "colour": 1}, "colour: there is no such key"),
        ({"ensemble": "e", "privacy": {"epsilo": 1}}, "privacy.epsilo: there is no such key"),
        ({"ensemble": "e", "privacy": {"epsilon": 0}}, "privacy.epsilon"),
        ({"ensemble": "e", "privacy": {"protocol": "magic"}}, "privacy.protocol"),
        ({"ensemble": "e", "engine": {"dtype": "int4"}}, "engine.dtype"),
        ({"ensemble": "e", "engine": {"kind": "tgi"}}, "engine.kind.*must be one of vllm, transformers, not 'tgi'"),
        ({"ensemble": "e", "http": {"port": 99999}}, "http.port"),
        ({"ensemble": "e", "budget": {"ledger": ""}}, "budget.ledger"),
        ({"ensemble": "e", "keys": {"database": ""}}, "keys.database"),
        ({"ensemble": "e", "engine": {"context_length": 512}}, "http.max_tokens"),
        ({"ensemble": "e", "http": {"host": "::"}}, "http.host: .*0.0.0.0"),
        ({"ensemble": "e", "http": {"api_keys": [""]}}, "http.api_keys: .*empty"),
    ],
)
def test_invalid_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Configuration.of(values)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"[1, 2]", "keys and values"),
        (b"a: [", "line 1: expected the node content"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"http: {port: 1}\nhunter2: 1\nhttp: {}", "line 3: the key http is there twice"),
        (b"http:\n  port: 1\n  port: 2", "line 3: the key port is there twice"),
        (b"on: hunter2", "line 1: 'on' is no key"),
        (b"http: {port: 8,123}", "line 1: '123' is no key"),
        (b"ensemble: e\nhttp:\n  port: 8,123", "http.port: .*integer"),
        (b"ensemble: {2024: hunter2}", "line 1: '2024' is no key"),
        (b"ensemble: e\nkeys: postgresql://user:hunter2@host/base", "keys: .*dictionary"),
        (b"ensemble: e\nbudget: [{signing_key: hunter2}]", "budget: .*dictionary"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "privmix.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=named) as refused:
        Configuration.load(path)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("PRIVMIX_PRIVACY_EPSILON", "write PRIVMIX_PRIVACY__EPSILON"),
        ("PRIVMIX_BUDGET_LEDGER", "write PRIVMIX_BUDGET__LEDGER"),
        ("PRIVMIX_ENSEMBEL", "write PRIVMIX_ENSEMBLE"),
        ("privmix_COLOUR", "remove it"),
    ],
)
def test_a_variable_that_sets_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, advice: str) -> None:
    """Else the ledger would be created with the default."""
    monkeypatch.setenv(variable, "hunter2")
    with pytest.raises(ConfigurationError, match=f"{variable} sets nothing; {advice}") as refused:
        Configuration.of({"ensemble": "e"})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("place", "fix"),
    [
        ("host=db dbname=first password=hunter2", "write a URL: postgresql://"),
        ("postgresql://user:a@hunter2@host/base", "write %40 for an @"),
        ("postgresql://user:hunter2@host:port/base", "neither a path nor a database URL"),
    ],
)
@pytest.mark.parametrize("setting", ["budget.ledger", "keys.database"])
def test_a_database_that_is_neither_a_path_nor_a_url_is_refused(setting: str, place: str, fix: str) -> None:
    section, name = setting.split(".")
    with pytest.raises(ConfigurationError, match=f"{setting}: .*{fix}") as refused:
        Configuration.of({"ensemble": "e", section: {name: place}})
    assert "hunter2" not in str(refused.value)


def test_api_keys_are_not_shown() -> None:
    configuration = Configuration.of({"ensemble": "e", "http": {"api_keys": ["secret-key"]}})
    assert "secret-key" not in repr(configuration)
    assert "secret-key" not in yaml.safe_dump(configuration.model_dump(mode="json"))
