"""Claim: `privmix reproduce` names every item of the papers, and each runs as it is, or says what to bring."""

import json
from pathlib import Path
from typing import Any

import pytest

from privmix.laboratory.evaluation import methods
from privmix.laboratory.evaluation.options import ComparisonOptions
from privmix.laboratory.evaluation.report import JSON_FILE
from privmix.laboratory.reproduce.catalogue import Item, load
from privmix_cluster import cli
from privmix_cluster.commands.reproduce import _measured
from privmix_cluster.method_options import MethodOptions
from tests.support.cli import privmix, refused, reported

ITEMS = {f"{name}/{item}": (paper, found) for name, paper in load().items() for item, found in paper.items.items()}


def test_the_list_names_every_item_and_what_it_needs() -> None:
    listed = privmix("reproduce", "--list").stdout
    assert all(name in listed for name in ITEMS)
    assert all(item.numbers or item.commands or item.parts or item.needs for _, item in ITEMS.values())


@pytest.mark.parametrize("name", [name for name, (_, item) in ITEMS.items() if item.parts or item.commands])
def test_the_commands_of_an_item_are_ones_that_privmix_takes(name: str, tmp_path: Path) -> None:
    paper, item = ITEMS[name]
    for quick in (None, "--block 128"):
        for verb, *arguments in paper.steps(item, Path("train"), Path("held-out"), tmp_path, quick):
            given = parsed(verb, arguments)
            if verb == "evaluate":
                check_evaluation(given, item)


def parsed(verb: str, arguments: list[str]) -> dict[str, Any]:
    command = cli.load(verb)
    if (group := getattr(command, "commands", None)) is not None:
        command, arguments = group[arguments[0]], arguments[1:]
    return dict(command.make_context(verb, arguments).params)


def check_evaluation(given: dict[str, Any], item: Item) -> None:
    """Every field that is set or swept is one of a protocol that is compared."""
    chosen = MethodOptions(given["protocol"], given["given"], given["sweep"]).values
    budget = {name: given[name] for name in ("epsilon", "delta", "tokens", "renyi_epsilon") if given[name] is not None}
    options = ComparisonOptions.checked(**chosen, **budget)
    for value in options.points:
        planned = [settings for _, settings in methods.chosen(options, value, item.parts[-1], halves=True)]
        assert planned
        for settings in planned:
            if settings.protocol in ("pmixed", "submix"):
                settings.plan(item.parts[-1])


def test_what_is_computed_is_printed_beside_the_paper_and_what_is_measured_as_commands() -> None:
    found = reported("reproduce", "adapmixed/table-2b")
    assert [(row["printed"], row["agrees"]) for row in found["numbers"]] == [("0.002", True), ("0.450", True)]
    assert [command.split()[1] for command in found["commands"]] == ["train", "evaluate"]
    assert "corpus: WikiText-103" in privmix("reproduce", "pmixed/figure-3").stdout


@pytest.mark.parametrize(
    ("options", "named"), [(["pmixed/figure-9"], "--list"), (["pmixed/figure-3", "--corpus", "x"], "--held-out")]
)
def test_wrong_options_are_refused_by_name(options: list[str], named: str) -> None:
    assert named in refused("reproduce", *options)


def test_a_share_of_the_gain_is_that_of_the_perplexities(tmp_path: Path) -> None:
    def result(label: str, *runs: float) -> dict[str, Any]:
        return {"label": label, "parts": 8, "perplexity": {"runs": runs}, "reached": {"measured": None}, "losses": None}

    results = [
        result("Public model", 39.0, 41.0),
        result("Fine-tuned, not private", 20.0),
        result("SubMix", 24.0, 26.0),
    ]
    (tmp_path / JSON_FILE).write_text(json.dumps({"sweep": None, "tables": [{"value": None, "results": results}]}))
    rows = list(_measured(load()["submix"].items["claims"], tmp_path, exact=True))
    assert [row["share"] for row in rows] == [None, 1, 0.75]
    assert rows[-1]["agrees"] is True


@pytest.mark.slow
def test_a_small_version_of_a_figure_runs_from_the_corpus_to_the_table(tmp_path: Path) -> None:
    rows = reported("reproduce", "pmixed/figure-4b", "--quick", "--output", tmp_path)["measured"]
    published = [row for row in rows if row["method"] == "PMixed, as published"]
    assert [row["tokens"] for row in published] == ["512", "1024", "2048", "4096", "8192"]
    assert all(row["perplexity"] < rows[0]["perplexity"] for row in published), "better than the public model"
