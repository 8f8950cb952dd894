"""Claim: `privmix plan` reports the radius of a budget and the cost of a radius, in agreement with the accounting."""

import pytest
import yaml

from privmix.privacy import accounting
from privmix.privacy.accounting import planning
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.pmixed import RatioEvent
from tests.support.cli import privmix, refused, reported

PAPER = ["plan", "--protocol", "pmixed", "--parts", "80", "--set", "q=0.03", "--tokens", "1024", "--delta", "1e-5"]
MANY = "2e6"
"""Tokens that are planned without exact composition, which would take minutes."""


def test_a_budget_is_turned_into_a_radius() -> None:
    planned = reported(*PAPER, "--set", "mollifier=ratio", "--epsilon", "8")
    assert planned["radius"] == pytest.approx(1.49, abs=1e-3)
    assert planned["epsilon_pld"] == pytest.approx(8, abs=1e-2)
    assert planned["epsilon_pld"] <= 8 < planned["epsilon_rdp"]
    assert planned["adjacency"] == "user"
    assert planned["best_order"] in accounting.ORDERS


def test_a_radius_is_evaluated() -> None:
    cost = planning.cost(RatioEvent(80, 0.03, 1.6), 1024, 1e-5)
    evaluated = reported(*PAPER, "--set", "radius=1.6")
    assert evaluated["radius"] == 1.6
    assert evaluated["best_order"] == cost.best_order
    # The shown number is rounded up, by at most its last digit.
    for shown, exact in ((evaluated["epsilon_rdp"], cost.epsilon_rdp), (evaluated["epsilon_pld"], cost.epsilon_pld)):
        assert exact is not None
        assert exact <= shown <= exact + 1e-9


@pytest.mark.parametrize("tokens", ["1e6", "1e8"])
def test_an_epsilon_that_nobody_would_promise_is_a_renyi_bound(tokens: str) -> None:
    evaluated = reported("plan", "--parts", "64", "--set", "radius=0.3", "--tokens", tokens)
    assert evaluated["epsilon_pld"] is None
    assert evaluated["epsilon_rdp"] > 64
    assert f"({accounting.shown(evaluated['epsilon_rdp'])}, 1e-05)" in evaluated["statement"]


def test_a_planned_radius_evaluates_to_its_budget() -> None:
    planned = reported(*PAPER, "--epsilon", "3")
    assert reported(*PAPER, "--set", f"radius={planned['radius']!r}") == planned


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (["--protocol", "magic", "--epsilon", "8"], "--protocol"),
        (["--set", "mollifier=magic", "--epsilon", "8"], "--set mollifier"),
        (["--parts", "0", "--epsilon", "8"], "--parts"),
        (["--set", "q=0", "--epsilon", "8"], "--set q"),
        (["--tokens", "0", "--epsilon", "8"], "--tokens"),
        (["--delta", "1", "--epsilon", "8"], "--delta"),
        (["--epsilon", "inf"], "--epsilon"),
        (["--epsilon", "1e-9"], "--epsilon"),
        ([], "--epsilon"),
        (["--epsilon", "8", "--set", "radius=1"], "--epsilon"),
        (["--set", "radius=100"], "--set radius"),
        (["--set", "mollifier=renyi"], "--epsilon"),
        (["--set", "mollifier=renyi", "--epsilon", "1"], "--epsilon"),
        (["--set", "mollifier=renyi", "--set", "radius=1"], "--set radius"),
        (["--set", "mollifier=renyi", "--epsilon", "8", "--set", "order=1"], "--set order"),
    ],
)
def test_wrong_options_are_refused_by_name(options: list[str], option: str) -> None:
    told = refused(*PAPER, *options)
    assert "Invalid value" in told
    assert option in told.replace("'", "")


def test_the_best_way_to_spend_a_budget_comes_first_as_commands_that_give_what_is_promised() -> None:
    words = ["plan", "--users", "2000", "--corpus-tokens", "2e6", "--tokens", MANY, "--epsilon", "8"]
    answer = reported(*words)
    best, *others = answer["plans"]
    assert {"dp-sgd", "individual"} < {way["protocol"] for way in answer["plans"]}
    assert max(way["gain"]["mean"] for way in others) <= 1.01 * best["gain"]["mean"]
    for way in answer["plans"]:
        train, *_, serve = way["commands"].split("\n  ")
        assert serve == "privmix serve --config privmix.yaml"
        settings = yaml.safe_load(way["commands"].partition("'privacy: ")[2].partition("'")[0])
        assert settings.pop("protocol") == way["protocol"]
        if "parts" not in way:
            assert train.strip() == "privmix train-base CORPUS --output ensemble --epsilon 8 --delta 1e-05"
            continue
        assert f"--parts {way['parts']} --part-kind {way['part_kind']}" in train
        assert (f"--base auto --base-share {way['base_share']:g} --epsilon 8 --delta 1e-05" in train) == (
            0 < way["base_share"] < 1
        )
        if not way["base_share"]:
            planned = PROTOCOLS[way["protocol"]](**settings).plan(way["parts"])
            assert getattr(planned, "radius") == pytest.approx(way["radius"])  # noqa: B009
            assert way["rows_a_token"] == (None if planned.rows is None else planned.rows + 1)
    shown = privmix(*words).stdout
    assert shown.index(best["commands"]) < shown.index("All ways, the best first")
    assert f"{best['gain']['mean']:.2f} ({best['gain']['low']:.2f}" in " ".join(shown.split())
    assert all(source.split(":")[0] in " ".join(shown.split()) for source in answer["sources"])


def test_plain_lora_is_planned_as_readers_that_all_read_each_token() -> None:
    words = ["plan", "--users", "2000", "--protocol", "pmixed", "--tokens", MANY, "--part-kind"]
    (reader, *_), (plain, *_) = (reported(*words, kind)["plans"] for kind in ("reader", "lora"))
    assert plain["share_kept"] == reader["share_kept"]
    assert (reader["rows_a_token"], plain["rows_a_token"]) == (2, 1 + plain["parts"])
    assert f"--parts {plain['parts']} --part-kind lora" in plain["commands"]
    assert "plain LoRA, which was not measured" in reported(*words, "lora")["leaves_out"][-1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "--parts: is missing; give the number of parts"),
        (["--users", "0"], "--users"),
        (["--users", "100", "--set", "q=0.5"], "--set: is not used with --users"),
        (["--parts", "4", "--corpus-tokens", "100"], "--corpus-tokens: needs --users"),
        (["--parts", "4", "--part-kind", "text"], "--part-kind: needs --users"),
        (["--users", "100", "--part-kind", "none"], "part_kind: "),
    ],
)
def test_a_wrong_proposal_names_the_option(words: list[str], problem: str) -> None:
    assert problem in refused("plan", *words)
