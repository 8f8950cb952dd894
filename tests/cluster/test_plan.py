"""Claim: `privmix plan` reports the radius of a budget and the cost of a radius, in agreement with the accounting."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from privmix.privacy import accounting
from privmix.privacy.accounting import planning
from privmix.privacy.protocols import DEFAULT
from privmix.privacy.protocols.pmixed import RatioEvent
from tests.support.cli import privmix

REFERENCE = Path(__file__).parents[1] / "services" / "privacy" / "accounting" / "reference.json"
PAPER = ["--protocol", "pmixed", "--parts", "80", "--q", "0.03", "--tokens", "1024", "--delta", "1e-5"]
RENYI = ["--mollifier", "renyi", "--epsilon", "8"]
MANY = "2e6"
"""Tokens that are planned without exact composition, which would take minutes."""


def run(*options: str) -> Result:
    return privmix("plan", *PAPER, *options)


def record(*options: str) -> dict[str, Any]:
    result = run(*options, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_a_budget_is_turned_into_a_radius() -> None:
    planned = record("--mollifier", "ratio", "--epsilon", "8")
    assert list(planned) == [
        "radius",
        "epsilon_rdp",
        "epsilon_pld",
        "best_order",
        "adjacency",
        "rdp_per_token",
        "guarantee",
        "statement",
    ]
    assert planned["radius"] == pytest.approx(1.49, abs=1e-3)
    assert planned["epsilon_pld"] == pytest.approx(8, abs=1e-2)
    assert planned["epsilon_pld"] <= 8 < planned["epsilon_rdp"]
    assert planned["adjacency"] == "user"
    assert planned["rdp_per_token"]["orders"] == accounting.ORDERS.tolist()
    assert planned["best_order"] in accounting.ORDERS


def test_a_radius_is_evaluated() -> None:
    event = RatioEvent(80, 0.03, 1.6)
    cost = planning.cost(event, 1024, 1e-5)
    evaluated = record("--radius", "1.6", "--orders", "1.5,2,3")
    assert evaluated["radius"] == 1.6
    assert evaluated["rdp_per_token"] == {"orders": [1.5, 2.0, 3.0], "values": event.rdp([1.5, 2, 3]).tolist()}
    assert evaluated["best_order"] == cost.best_order
    # The shown number is rounded up, by at most its last digit.
    for shown, exact in (
        (evaluated["epsilon_rdp"], cost.epsilon_rdp),
        (evaluated["epsilon_pld"], cost.epsilon_pld),
    ):
        assert exact is not None
        assert exact <= shown <= exact + 1e-9


@pytest.mark.parametrize("tokens", ["1e6", "1e8"])
def test_an_epsilon_that_nobody_would_promise_is_a_renyi_bound(tokens: str) -> None:
    evaluated = json.loads(privmix("plan", "--parts", "64", "--radius", "0.3", "--tokens", tokens, "--json").stdout)
    assert evaluated["epsilon_pld"] is None
    assert evaluated["epsilon_rdp"] > 64
    assert f"({accounting.shown(evaluated['epsilon_rdp'])}, 1e-05)" in evaluated["statement"]


def test_the_divergences_are_those_of_an_independent_computation() -> None:
    for entry in json.loads(REFERENCE.read_text())["divergences"]:
        given = {"parts": entry["parts"], "q": entry["q"], "radius": entry["radius"]}
        options = [each for name, value in given.items() for each in (f"--{name}", repr(value))]
        found = record("--mollifier", "ratio", *options, "--orders", ",".join(map(str, entry["orders"])))
        assert found["adjacency"] == "user"
        assert found["rdp_per_token"]["orders"] == entry["orders"]
        assert found["rdp_per_token"]["values"] == pytest.approx(entry["rdp"], rel=1e-6)


def test_a_planned_radius_evaluates_to_its_budget() -> None:
    planned = record("--epsilon", "3")
    assert record("--radius", repr(planned["radius"])) == planned


def test_the_published_mollifier_has_a_beta_for_each_number_drawn() -> None:
    planned = record(*RENYI)
    assert planned["guarantee"] == "as published"
    assert list(planned["beta"]) == [str(drawn) for drawn in range(1, 81)]
    # Values from an independent implementation of the theorems.
    expected = {"1": 0.5651779925204822, "2": 0.1938421997870061, "3": 0.2235876116386573}
    assert {drawn: planned["beta"][drawn] for drawn in expected} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "options", [["--epsilon", "8"], ["--radius", "0.5"], ["--mollifier", "renyi", "--epsilon", "8"]]
)
def test_people_read_a_table(options: list[str]) -> None:
    result = run(*options)
    assert result.exit_code == 0, result.output
    for piece in (
        "1024 tokens at delta 1e-05 from 80 parts",
        "epsilon",
        "any one",
    ):
        assert piece in result.stdout
    assert ("certified" in result.stdout) != ("as published" in result.stdout)


def test_an_epsilon_for_people_is_rounded_up() -> None:
    exact = planning.cost(RatioEvent(80, 0.03, 0.5), 1024, 1e-5).epsilon_rdp
    assert accounting.shown(exact) in run("--radius", "0.5").stdout
    assert float(accounting.shown(exact)) >= exact


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (["--protocol", "magic", "--epsilon", "8"], "--protocol"),
        (["--mollifier", "magic", "--epsilon", "8"], "--mollifier"),
        (["--projection", "magic", "--epsilon", "8"], "--projection"),
        (["--parts", "0", "--epsilon", "8"], "--parts"),
        (["--q", "0", "--epsilon", "8"], "--q"),
        (["--q", "1.5", "--epsilon", "8"], "--q"),
        (["--q", "nan", "--epsilon", "8"], "--q"),
        (["--tokens", "0", "--epsilon", "8"], "--tokens"),
        (["--delta", "1", "--epsilon", "8"], "--delta"),
        (["--epsilon", "-1"], "--epsilon"),
        (["--epsilon", "inf"], "--epsilon"),
        (["--epsilon", "1e-9"], "--epsilon"),
        ([], "--epsilon"),
        (["--epsilon", "8", "--radius", "1"], "--epsilon"),
        (["--radius", "0"], "--radius"),
        (["--radius", "100"], "--radius"),
        (["--radius", "1", "--orders", "2,x"], "--orders"),
        (["--radius", "1", "--orders", "1"], "--orders"),
        (["--mollifier", "renyi"], "--epsilon"),
        (["--mollifier", "renyi", "--epsilon", "1"], "--epsilon"),
        (["--mollifier", "renyi", "--radius", "1"], "--radius"),
        (["--mollifier", "renyi", "--epsilon", "8", "--order", "1"], "--order"),
    ],
)
def test_wrong_options_are_refused_by_name(options: list[str], option: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert "Invalid value" in result.stderr
    assert option in result.stderr.replace("'", "")


def test_a_platform_team_learns_what_it_would_get() -> None:
    words = ["plan", "--users", "50000", "--tokens", MANY, "--epsilon", "8"]
    answer = json.loads(privmix(*words, "--protocol", "pmixed", "--json").stdout)
    assert 2 <= answer["parts"] <= 2000
    assert answer["protocol"] == "pmixed"
    assert answer["radius"] > 0
    kept = answer["gain_expected"]["share_kept"]
    assert 0 < kept["low"] <= kept["mean"] <= kept["high"]
    assert answer["gain_expected"]["nats_a_token"] is None
    assert answer["gain_expected"]["leaves_out"]
    shown = privmix(*words, "--protocol", "pmixed", "--corpus-tokens", "2e7").stdout
    assert "2,000,000 tokens at epsilon 8" in shown
    assert "from the public model's" in shown
    assert "privmix train --part-kind" in shown


def test_a_platform_team_learns_what_individual_budgets_would_give() -> None:
    words = ["plan", "--users", "50000", "--corpus-tokens", "2e7", "--tokens", MANY, "--epsilon", "2"]
    answer = json.loads(privmix(*words, "--json").stdout)
    own = answer["individual"]
    named = json.loads(privmix(*words, "--protocol", "individual", "--json").stdout)
    assert "individual" not in named
    assert (named["parts"], named["horizon"], named["rows_a_token"]) == (own["parts"], 2_000_000, own["parts"] + 1)
    assert 0 < named["parameters"]["lower"] == own["lower"] < 1
    assert named["gain_expected"] == own["gain_expected"]
    assert "any number of released tokens" in named["statement"]
    gains = [each["gain_expected"]["nats_a_token"]["mean"] for each in (own, answer)]
    assert own["better"] is (gains[0] > 1.01 * gains[1]) is True
    shown = " ".join(privmix(*words).stdout.split())
    assert f"--protocol individual, with {own['parts']:,} parts, L {own['lower']:.2g}" in shown
    assert "tokens, no limit" in privmix(*words, "--protocol", "individual").stdout


def test_a_platform_team_learns_what_a_private_base_would_give() -> None:
    words = ["plan", "--users", "2000", "--tokens", MANY, "--epsilon", "8"]
    assert "private_base" not in json.loads(privmix(*words, "--json").stdout)
    words += ["--corpus-tokens", "2e6"]
    own = json.loads(privmix(*words, "--json").stdout)["private_base"]
    assert own["epsilon"] == pytest.approx(8 * own["share"])
    expected = own["gain_expected"]
    whole, base, parts = (expected[name]["mean"] for name in ("nats_a_token", "of_the_base", "of_the_parts"))
    assert whole == pytest.approx(base + parts)
    assert "tests.benchmarks.private_base" in expected["source"]
    shown = " ".join(privmix(*words).stdout.split())
    assert f"{whole:.2f}" in shown
    assert "private base" in shown


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "--parts: is missing; give the number of parts"),
        (["--users", "0"], "--users"),
        (["--users", "1.5"], "--users"),
        (["--users", "100", "--q", "0.5"], "--q: is not used with --users"),
        (["--parts", "4", "--corpus-tokens", "100"], "--corpus-tokens: needs --users"),
        (["--parts", "4", "--part-kind", "text"], "--part-kind: needs --users"),
        (["--users", "100", "--part-kind", "none"], "part_kind: "),
    ],
)
def test_a_wrong_proposal_names_the_option(words: list[str], problem: str) -> None:
    refused = privmix("plan", *words)
    assert refused.exit_code == 2
    assert problem in refused.output


def test_the_help_names_the_default_protocol() -> None:
    shown = " ".join(privmix("plan", "--help").stdout.replace("│", " ").split())
    assert f"The protocol. Default: {DEFAULT};" in shown


@pytest.mark.parametrize(("protocol", "kept"), [("exponential", 0.8073), ("individual", 0.8196)])
def test_a_private_base_leaves_most_of_the_radius(protocol: str, kept: float) -> None:
    """A base of half of epsilon costs a fifth of the radius: Rényi costs add, and epsilons grow like their roots."""
    words = ["plan", "--parts", "64", "--protocol", protocol, "--epsilon", "8", "--tokens", "16384", "--json"]
    done = privmix(*words, "--base-epsilon", "4")
    assert done.exit_code == 0, done.output
    planned = json.loads(done.stdout)
    base = planned["base"]
    assert base["epsilon_pld"] == pytest.approx(4.0, abs=1e-3)
    assert planned["radius"] / base["tokens_without_it"]["radius"] == pytest.approx(kept, abs=1e-3)
    assert planned["epsilon_rdp"] == pytest.approx(8.0, abs=1e-3), "the sum of both"
    assert json.loads(privmix(*words).stdout)["radius"] == base["tokens_without_it"]["radius"]


def test_a_base_must_leave_something() -> None:
    words = ["plan", "--parts", "64", "--protocol", "exponential", "--epsilon", "4", "--base-epsilon", "4"]
    refused = privmix(*words)
    assert refused.exit_code == 2
    assert "base-epsilon" in refused.stderr
    assert "must lie between 0 and the --epsilon of all" in refused.stderr


def test_the_runbook_has_the_planners_figures() -> None:
    runbook = (Path(__file__).parents[2] / "k8s" / "runbook.md").read_text()
    rows = [line.split("|") for line in runbook.splitlines() if "`privmix plan" in line and line.startswith("| ")]
    planned = []
    for *_, command, _ in rows:
        shown = privmix(*command.strip(" `").split()[1:], "--json")
        assert shown.exit_code == 0, shown.output
        planned.append(json.loads(shown.stdout))
    budget, population = planned
    assert f"a radius of {budget['radius']:.2f} nats" in rows[0][2]
    kept = {
        name: f"{share:.0%}".replace("%", " %") for name, share in population["gain_expected"]["share_kept"].items()
    }
    for figure in (
        f"{population['parts']:,} parts, `{population['protocol']}` with `sample` {population['parameters']['sample']}",
        f"{population['rows_a_token']} model rows a token",
        f"a radius of {population['radius']:.2f} nats",
        f"{kept['mean']} ({kept['low']} to {kept['high']}) of the gain",
    ):
        assert figure in rows[1][2]
