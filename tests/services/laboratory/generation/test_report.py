"""Claim: a job's report compares with the public model's texts, is self-contained, and marks its private parts."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from privmix.foundation.errors import InputError
from privmix.generation.baseline import FILE, load_baseline, write_baseline
from privmix.generation.client import Sampling
from privmix.generation.job import JobRequest
from privmix.generation.template import Fields, items
from tests.ensembles import write_ensemble
from tests.services.generation.small_service import SmallService, serving
from tests.support.cli import privmix
from tests.support.jobs import run

SECRET = "heliotrope"


@pytest.fixture(scope="module")
def job(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("job") / "job"
    rows: list[Fields] = [{"label": "urgent", "count": 12}, {"label": "routine", "count": 12}]
    request = JobRequest("Label: {label}", tuple(items("Label: {label}", rows)), Sampling(8))
    with serving(SmallService()) as service:
        run(directory, service.url, request)
    write_baseline(directory, request, tiny, lambda done: None)
    return directory


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real") / "real.jsonl"
    lines = [
        {"user": f"u{n}", "text": f"{'it hurts' if n % 2 else 'a date'} {SECRET} w1 w2 w3 w4 w5 w6 w7 w8 {n}",
         "label": "urgent" if n % 2 else "routine"}
        for n in range(80)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Sources(HTMLParser):
    """Collects the addresses that a page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]


def test_the_baseline_is_generated_once_with_the_same_items(job: Path, tiny: Path) -> None:
    texts = load_baseline(job)
    assert texts is not None
    assert [text["id"] for text in texts] == list(range(24))
    assert {text["label"] for text in texts} == {"urgent", "routine"}
    assert len({text["text"] for text in texts}) > 12
    before = (job / FILE).read_bytes()
    rows: list[Fields] = [{"label": "urgent", "count": 24}]
    write_baseline(job, JobRequest("x{label}", tuple(items("x{label}", rows)), Sampling(8)), tiny, lambda done: None)
    assert (job / FILE).read_bytes() == before


def test_the_public_report_is_self_contained(job: Path, tiny: Path) -> None:
    done = privmix("generate", "report", str(job), "--public-model", str(tiny))
    assert done.exit_code == 0, done.output
    page = (job / "report.html").read_text()
    assert all(source.startswith("data:image/png;base64,") for source in Sources(page).addresses)
    assert len(Sources(page).addresses) == 4
    assert "Small promise." in page
    assert "private synthetic" in page
    assert "public model" in page
    assert "For the operator only" not in page
    rows = {row["name"]: row for row in json.loads((job / "report.json").read_bytes())["rows"]}
    assert rows.keys() == {"private synthetic", "public model"}
    assert rows["private synthetic"]["lengths"]["mean"] == 8
    # The report compares 24 copies of the same eight words with random words.
    assert rows["private synthetic"]["variety"]["distinct"]["1"] < rows["public model"]["variety"]["distinct"]["1"]


def test_the_operators_report_marks_its_private_columns(job: Path, tiny: Path, real: Path) -> None:
    words = ["generate", "report", str(job), "--public-model", str(tiny), "--real", str(real), "--label-field", "label"]
    refused = privmix(*words)
    assert refused.exit_code == 2
    assert "--operator" in refused.output
    done = privmix(*words, "--operator", "--json")
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["real text"]["utility"]["accuracy"] == 1.0
    assert rows["private synthetic"]["utility"]["accuracy"] < 1.0
    assert rows["private synthetic"]["overlap"]["copied"] == 1.0
    assert rows["public model"]["overlap"]["copied"] == 0.0
    assert rows["real text"]["mauve"] is None  # too few texts
    page = (job / "report-operator.html").read_text()
    assert "For the operator only" in page
    assert SECRET not in page
    assert SECRET not in (job / "report-operator.json").read_text()
    assert not re.search(SECRET, done.output)


@pytest.mark.slow
def test_a_fine_tuned_model_gives_a_second_perplexity(job: Path, tmp_path: Path) -> None:
    one, two = write_ensemble(tmp_path / "one", 1), write_ensemble(tmp_path / "two", 2)
    words = ["generate", "report", str(job), "--operator", "--json", "--finetuned"]
    refused = privmix(*words, str(two))
    assert "has 2 parts" in refused.output
    done = privmix(*words, str(one))
    assert done.exit_code == 0, done.output
    for row in json.loads(done.stdout)["rows"]:
        assert row["finetuned_perplexity"] > 1
        assert row["finetuned_perplexity"] != row["perplexity"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--label-field", "label"], "--label-field: needs --real"),
        (["--finetuned", "x"], "--operator"),
    ],
)
def test_an_impossible_report_names_the_option(job: Path, words: list[str], problem: str) -> None:
    refused = privmix("generate", "report", str(job), *words)
    assert refused.exit_code == 2
    assert problem in refused.output.replace("Invalid value for ", "")


def test_a_directory_without_a_job_is_refused(tmp_path: Path) -> None:
    refused = privmix("generate", "report", str(tmp_path))
    assert refused.exit_code == 2
    assert "is not a job of `privmix generate`" in refused.output


def test_a_damaged_baseline_is_named(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / FILE).write_text("heliotrope\n")
    with pytest.raises(InputError, match="is damaged"):
        write_baseline(tmp_path, JobRequest("x", tuple(items("x", [{}])), Sampling(8)), tiny, lambda done: None)
