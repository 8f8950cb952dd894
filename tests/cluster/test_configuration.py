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


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "privmix.yaml"
    path.write_text("ensemble: here\nbudget: {ledger: there.db}")
    configuration = Configuration.load(path)
    assert configuration.ensemble == tmp_path / "here"
    assert configuration.budget.ledger == str(tmp_path / "there.db")


def test_a_database_url_and_a_hub_id_are_no_paths(tmp_path: Path) -> None:
    values = {"ensemble": "here", "model": "org/model", "budget": {"ledger": "postgresql://host/base"}}
    configuration = Configuration.of(values, tmp_path)
    assert configuration.model == "org/model"
    assert configuration.budget.ledger == "postgresql://host/base"


def test_the_environment_has_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "privmix.yaml"
    path.write_text("ensemble: here\nprivacy: {epsilon: 4, q: 0.5}")
    monkeypatch.setenv("PRIVMIX_PRIVACY__EPSILON", "2")
    configuration = Configuration.load(path)
    assert isinstance(configuration.privacy, PMixedSettings)
    assert (configuration.privacy.epsilon, configuration.privacy.q) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "ensemble: is missing"),
        ({"ensemble": "e", "colour": 1}, "colour: there is no such key"),
        ({"ensemble": "e", "privacy": {"epsilo": 1}}, "privacy.epsilo: there is no such key"),
        ({"ensemble": "e", "privacy": {"epsilon": 0}}, "privacy.epsilon"),
        ({"ensemble": "e", "privacy": {"epsilon": float("inf")}}, "privacy.epsilon"),
        ({"ensemble": "e", "privacy": {"delta": 1}}, "privacy.delta"),
        ({"ensemble": "e", "privacy": {"q": 0}}, "privacy.q"),
        ({"ensemble": "e", "privacy": {"protocol": "magic"}}, "privacy.protocol"),
        ({"ensemble": "e", "engine": {"dtype": "int4"}}, "engine.dtype"),
        ({"ensemble": "e", "http": {"port": 99999}}, "http.port"),
        ({"ensemble": "e", "engine": {"context_length": 512}}, "http.max_tokens"),
    ],
)
def test_invalid_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Configuration.of(values)


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"[1, 2]", "keys and values"), (b"a: [", "not YAML"), (b"\xff\xfe\x00", "not YAML")],
)
def test_a_file_that_is_not_a_configuration_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "privmix.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=named):
        Configuration.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.yaml"):
        Configuration.load(tmp_path / "none.yaml")


SEVERAL = {
    "engine": {"context_length": 4096, "kind": "transformers"},
    "privacy": {"epsilon": 4.0},
    "budget": {"lease_tokens": 8},
    "ensembles": {
        "clinic": {"ensemble": "a", "privacy": {"protocol": "exponential", "sample": 2}},
        "court": {"ensemble": "b", "budget": {"ledger": "postgresql://host/b"}, "engine": {"dtype": "float32"}},
    },
}


def test_what_an_ensemble_leaves_out_is_as_at_the_top_level(tmp_path: Path) -> None:
    configuration = Configuration.of({**SEVERAL, "namespace": "n"}, tmp_path)
    clinic, court = configuration.served
    assert (clinic.names, clinic.namespace, clinic.own_shares) == (("clinic",), "n.clinic", True)
    assert (clinic.ensemble, court.ensemble) == (tmp_path / "a", tmp_path / "b")
    assert (clinic.privacy.protocol, clinic.privacy.epsilon) == ("exponential", 8.0), (
        "a protocol is told all of its own"
    )
    assert court.privacy == configuration.privacy
    assert (court.engine.dtype, court.engine.context_length) == ("float32", 4096)
    assert (clinic.budget.ledger, clinic.budget.lease_tokens) == (str(tmp_path / "clinic.ledger.db"), 8)
    assert court.budget.ledger == "postgresql://host/b"
    assert configuration.choose("court") == court
    for name in (None, "hospital"):
        with pytest.raises(ConfigurationError, match="clinic, court"):
            configuration.choose(name)


def test_an_ensemble_of_the_top_level_stays_what_it_was_when_others_come(tmp_path: Path) -> None:
    alone = Configuration.of({"ensemble": "e", "model": "org/base"}, tmp_path).choose()
    first, second = Configuration.of(
        {"ensemble": "e", "model": "org/base", "ensembles": {"new": {"ensemble": "f"}}}, tmp_path
    ).served
    assert first == alone
    assert (alone.names, alone.namespace, alone.own_shares) == (("privmix",), "privmix", False)
    assert (second.model, second.budget.ledger) == (None, str(tmp_path / "new.ledger.db"))


def test_the_environment_reaches_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVMIX_ENSEMBLES__COURT__BUDGET__LEDGER", "postgresql://secret/b")
    court = Configuration.of(SEVERAL).choose("court")
    assert court.budget.ledger == "postgresql://secret/b"
    assert court.engine.dtype == "float32"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"ensembles": {"a": {"ensemble": "e", "cohort": "a"}}}, "ensembles.a.cohort: a is the name of an ensemble"),
        ({"ensembles": {"a b": {"ensemble": "e"}}}, "ensembles.a b"),
        ({"ensembles": {"a": {}}}, "ensembles.a.ensemble: is missing"),
        ({"ensembles": {"a": {"ensemble": "e", "colour": 1}}}, "ensembles.a.colour: there is no such key"),
        ({"ensembles": {"a": {"ensemble": "e", "privacy": {"epsilon": 0}}}}, "ensembles.a.privacy.epsilon"),
        ({"ensembles": {"a": {"ensemble": "e", "privacy": {"protocol": "magic"}}}}, "ensembles.a.privacy.protocol"),
        (
            {"ensembles": {"a": {"ensemble": "e", "engine": {"context_length": 99}}}},
            "ensembles.a.engine.context_length",
        ),
        ({"ensembles": {"a": {"ensemble": "e"}, "b": {"ensemble": "./e"}}}, "ensembles.b: has the ensemble of another"),
        ({"ensemble": "e", "ensembles": {"privmix": {"ensemble": "f"}}}, "ensembles.privmix: has the name of another"),
        (
            {"ensemble": "e", "ensembles": {"a": {"ensemble": "f", "budget": {"ledger": "ledger.db"}}}},
            "ensembles.a: has the budget.ledger of another",
        ),
        (
            {"ensembles": {"a": {"ensemble": "e"}}, "http": {"served_model_names": ["x"]}},
            "http.served_model_names: needs `ensemble` at the top level",
        ),
    ],
)
def test_several_that_cannot_be_served_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Configuration.of(values)
    assert named in str(refused.value)


def test_an_empty_api_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"http\.api_keys: .*empty"):
        Configuration.of({"ensemble": "e", "http": {"api_keys": [""]}})


def test_api_keys_are_not_shown() -> None:
    configuration = Configuration.of({"ensemble": "e", "http": {"api_keys": ["secret-key"]}})
    assert "secret-key" not in repr(configuration)
    assert "secret-key" not in yaml.safe_dump(configuration.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("alerts", "named"),
    [
        ({"webhooks": ["ftp://hunter2"]}, "number 1 is not an http or https URL"),
        ({"secret": "hunter2"}, "openssl rand -base64 32"),
        ({"secret": "whsec_hunter2"}, "openssl rand -base64 32"),
        ({"thresholds": [80]}, "less than or equal to 1"),
    ],
)
def test_alerts_that_could_not_be_sent_are_refused_without_showing_secrets(
    alerts: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Configuration.of({"ensemble": "here", "alerts": alerts}, tmp_path)
    assert named in str(refused.value)
    assert str(refused.value).startswith("alerts.")
    assert "hunter2" not in str(refused.value)
