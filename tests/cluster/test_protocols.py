"""Claim: every protocol is listed, planned and configured by its name, and states its guarantee in a sentence."""

from functools import partial

import pytest

from privmix.privacy.protocols import PROTOCOLS
from privmix_cluster.configuration import Configuration
from tests.support.cli import privmix, refused, reported
from tests.support.mechanisms import audited

CERTIFIED = list(dict.fromkeys(name for name, _ in audited(16)))


def test_all_are_listed_with_what_they_promise_ask_and_take() -> None:
    listed = {record["name"]: record for record in reported("protocols")}
    assert set(listed) == set(PROTOCOLS)
    statuses = {name: record["guarantee"] for name, record in listed.items()}
    assert {*CERTIFIED, "dp-sgd", "public"} == {name for name, status in statuses.items() if status == "certified"}
    assert (statuses["submix"], statuses["ensemble"], statuses["finetuned"]) == ("operational", "none", "none")
    for record in listed.values():
        assert record["summary"]
        assert record["choose"]
        assert all(parameter["description"] for parameter in record["parameters"].values())
    shown = privmix("protocols").stdout
    for name, record in listed.items():
        assert name in shown
        assert all(parameter in shown for parameter in record["parameters"])


def test_a_protocol_without_a_bound_says_so() -> None:
    planned = partial(reported, "plan", "--parts", "16", "--protocol")
    submix = planned("submix", "--epsilon", "8", "--set", "random_stopping=10")
    assert submix["epsilon_rdp"] is submix["epsilon_pld"] is submix["best_order"] is None
    assert submix["fixed_length"]["epsilon"] > 8
    assert "operational privacy" in submix["statement"]
    assert "No epsilon is stated" in submix["statement"]
    assert "No privacy guarantee" in planned("ensemble")["statement"]
    assert planned("public", "--epsilon", "8")["epsilon_rdp"] == 0
    assert "data-dependent" in planned("adapmixed", "--set", "mollifier=renyi")["statement"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--protocol", "gnmax", "--set", "q=0.5", "--epsilon", "8"], "--set q"),
        (["--protocol", "gnmax", "--set", "sigma=many"], "--set sigma"),
        (["--protocol", "gnmax", "--set", "sigma"], "--set"),
        (["--protocol", "gnmax", "sigma"], "sigma"),
        (["--protocol", "gnmax", "--set", "sigma=3", "--epsilon", "8"], "--epsilon"),
        (["--protocol", "finetuned"], "train --parts 1"),
        (["--protocol", "ensemble", "--epsilon", "8"], "--epsilon"),
        (["--protocol", "adapmixed", "--set", "mollifier=renyi", "--set", "enforce=bound"], "enforce"),
    ],
)
def test_a_parameter_that_is_not_the_protocols_is_refused_by_name(arguments: list[str], named: str) -> None:
    assert named in refused("plan", "--parts", "4", *arguments)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_each_is_configured_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(Configuration.of({"ensemble": "e", "privacy": {"protocol": name}}).privacy) is PROTOCOLS[name]
    monkeypatch.setenv("PRIVMIX_PRIVACY__PROTOCOL", name)
    monkeypatch.setenv("PRIVMIX_PRIVACY__TOKENS", "77")
    configured = Configuration.of({"ensemble": "e"}).privacy
    assert (type(configured), configured.tokens) == (PROTOCOLS[name], 77)
