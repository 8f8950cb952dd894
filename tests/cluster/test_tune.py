"""Claim: `privmix tune` recommends valid configurations and refuses private text."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import Result

from privmix.budget.reader import read
from privmix.training.corpus import Document
from privmix.training.directory import SALT
from privmix.training.manifest import Manifest
from privmix.training.marks import Marks
from privmix_cluster.configuration import Configuration
from tests.support.cli import privmix
from tests.tiny import write_tiny_model

# With this number of users, the probability that none is held out is 1e-6.
USERS = 60
DOCUMENTS = [
    {"user": f"user-{number}", "text": f"The ferry to island {number} leaves at nine, and waits for nobody."}
    for number in range(USERS)
]


def write(path: Path, documents: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in documents))
    return path


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return write(tmp_path / "sample.jsonl", DOCUMENTS)


def tune(sample: Path, output: Path, *options: object) -> Result:
    return privmix("tune", "--set-aside", sample, "--output", output, "--tokens", 24, "--runs", 2, *options)


@pytest.mark.parametrize("private", [DOCUMENTS[:1], [{"user": "someone", "text": DOCUMENTS[5]["text"]}]])
def test_the_private_file_is_refused(sample: Path, tmp_path: Path, private: list[dict[str, str]]) -> None:
    refused = tune(sample, tmp_path / "out", "--private-corpus", write(tmp_path / "private.jsonl", private))
    assert refused.exit_code == 2
    assert "private.jsonl: tuning on private text reveals information" in refused.stderr
    assert "cost privacy that is not counted" in refused.stderr
    assert DOCUMENTS[5]["text"] not in refused.output


def test_the_text_of_the_deployed_ensemble_is_refused(sample: Path, ensemble: Path, tmp_path: Path) -> None:
    deployed = tmp_path / "deployed"
    deployed.mkdir()
    manifest = Manifest.load(ensemble)
    manifest.save(deployed)
    unmarked = tune(sample, tmp_path / "out", "--private-ensemble", deployed)
    assert unmarked.exit_code == 2
    assert "--salt-file" in unmarked.stderr
    (deployed / SALT).write_bytes(bytes(32))
    marks = Marks(bytes(32))
    list(marks.of([Document("user-3", "a text that only they have")]))
    with marks.saving(deployed):
        pass
    refused = tune(sample, tmp_path / "out", "--private-ensemble", deployed)
    assert refused.exit_code == 2
    assert "1 of its users and 0 of its 60 texts are in the text that" in refused.stderr
    same = tune(sample, tmp_path / "out", "--private-ensemble", deployed, "--ensemble", ensemble)
    assert same.exit_code == 2
    assert "is the deployed ensemble of private text" in same.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--private", "HELD_OUT"], "private-epsilon: give"),
        (["--private", "HELD_OUT", "--private-epsilon", 1], "ledger: give"),
        (["--private", "HELD_OUT", "--private-epsilon", 0, "--ledger", "LEDGER"], "private-epsilon: give"),
        (["--private-epsilon", 1], "private-epsilon: belongs to a choice on private users"),
        (["--ledger", "LEDGER"], "ledger: belongs to a choice on private users"),
    ],
)
def test_a_private_choice_needs_a_price_and_a_ledger(
    sample: Path, tmp_path: Path, options: list[object], named: str
) -> None:
    paths = {
        "HELD_OUT": write(tmp_path / "users.jsonl", [{"user": "held out", "text": "What a day it was."}]),
        "LEDGER": tmp_path / "ledger.db",
    }
    refused = tune(sample, tmp_path / "out", *(paths.get(str(option), option) for option in options))
    assert refused.exit_code == 2
    assert named in refused.stderr
    assert not (tmp_path / "ledger.db").exists()


def test_users_of_the_sample_are_no_private_users_to_choose_on(sample: Path, tmp_path: Path) -> None:
    price = ["--private-epsilon", 1, "--ledger", tmp_path / "ledger.db"]
    refused = tune(sample, tmp_path / "out", "--private", sample, *price)
    assert refused.exit_code == 2
    assert "tuning on private text" in refused.stderr


@pytest.mark.slow
def test_a_choice_on_private_users_is_paid_for_once(sample: Path, tmp_path: Path) -> None:
    users = write(tmp_path / "users.jsonl", [{"user": f"new {n}", "text": f"Stop {n} is closed."} for n in range(5)])
    ledger = tmp_path / "ledger.db"
    options = ["--model", write_tiny_model(tmp_path / "model"), "--parts", 2, "--private", users, "--ledger", ledger]
    for _ in range(2):
        done = tune(sample, tmp_path / "out", *options, "--private-epsilon", 2, "--json")
        assert done.exit_code == 0, done.output
        chosen = json.loads(done.stdout)["private_choice"]
        assert chosen["users"] == 5
        assert chosen["epsilon"] == 2
        assert f"{chosen['label']}, {chosen['parts']} parts" in chosen["candidates"]
        assert [event.epsilon for event in read(ledger).charged] == [2.0]  # type: ignore[attr-defined]
    shown = tune(sample, tmp_path / "out", *options, "--private-epsilon", 2)
    assert "Chosen on 5 private users" in shown.stdout


@pytest.mark.slow
def test_a_share_of_epsilon_for_a_base_is_searched(sample: Path, tmp_path: Path) -> None:
    """Ensembles of one size alone and on a base of half of epsilon are compared at one budget."""
    model = write_tiny_model(tmp_path / "model", context=512)
    shares = ["--base-share", 0.5, "--epsilon", 4]
    done = tune(sample, tmp_path / "own", "--model", model, "--parts", 2, *shares, "--json")
    assert done.exit_code == 0, done.output
    choices = json.loads(done.stdout)["choices"]
    exponential = [each for each in choices if each["protocol"] == "exponential"]
    assert {each["base"] for each in exponential} == {None, 2.0}
    assert {"Exponential mechanism", "Exponential mechanism, on a base of epsilon 2"} <= {
        each["label"] for each in exponential
    }
    base, on_base = (Manifest.load(tmp_path / "own" / "ensembles" / name) for name in ("base-0.5", "2-on-base-0.5"))
    assert on_base.private_base is not None
    assert base.dp_sgd == on_base.private_base.training
    assert tune(sample, tmp_path / "no", "--base-share", 1).exit_code == 2
    assert tune(sample, tmp_path / "no", "--base-share", 0.5, "--ensemble", tmp_path / "own").exit_code == 2


@pytest.mark.slow
def test_the_recommendation_can_be_configured(sample: Path, tmp_path: Path) -> None:
    """Trains small ensembles on one side of the sample; then uses an existing ensemble with other text."""
    model = write_tiny_model(tmp_path / "model")
    done = tune(sample, tmp_path / "own", "--model", model, "--parts", 2, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "own" / "tuning.json").read_text())
    assert (tmp_path / "own" / "tuning.png").read_bytes().startswith(b"\x89PNG")
    assert {each["parts"] for each in found["choices"]} == {2}
    labels = {each["label"] for each in found["choices"]}
    assert {"Public model", "PMixed, clip", "Exponential mechanism", "AdaPMixed, certified"} <= labels
    assert found["recommended"]["status"] == "certified"
    few = tune(sample, tmp_path / "own", "--parts", 2, "--tokens", 5000, "--run-tokens", 12, "--drawn", 1, "--json")
    assert few.exit_code == 0, few.output
    longer = json.loads(few.stdout)
    assert (longer["budget"]["tokens"], longer["positions"]) == (5000, 12)
    assert {each["parameters"]["sample"] for each in longer["choices"] if each["protocol"] == "exponential"} == {1}
    ensemble = tmp_path / "own" / "ensembles" / "2"
    refused = tune(sample, tmp_path / "other", "--ensemble", ensemble)
    assert refused.exit_code == 2, "the ensemble was trained on part of the sample"
    renamed = [{"user": f"other {item['user']}", "text": f"Again: {item['text']}"} for item in DOCUMENTS]
    shown = tune(write(tmp_path / "other.jsonl", renamed), tmp_path / "other", "--ensemble", ensemble)
    assert shown.exit_code == 0, shown.output
    assert "Recommended" in shown.stdout
    start = shown.stdout.index("privacy:")
    chosen = yaml.safe_load(shown.stdout[start : shown.stdout.index("/", start)].rpartition("\n")[0])
    privacy = Configuration.of({"ensemble": str(ensemble), **chosen}).privacy
    assert privacy.plan(2).name == chosen["privacy"]["protocol"]
