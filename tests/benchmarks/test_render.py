"""Claim: what pages say of measurements is what the records hold."""

import json
import re
from pathlib import Path

import pytest
import typer

from tests.benchmarks import figures, record, render

MEASUREMENTS = [
    record.ROOT / "tests" / "benchmarks" / "README.md",
]
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def test_no_page_differs_from_its_records() -> None:
    """If this fails, run `python -m tests.benchmarks.render`."""
    assert [str(page.relative_to(record.ROOT)) for page in render.differing()] == []


def test_a_changed_figure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the figures that follow from it: one ratio decides three cells of the runbook and one of the measurements."""
    before, changed = figures.record, record.MeasuredRecord.read("load-pmixed")
    changed.figures["private_over_plain"]["pmixed,80,512,8"] = 0.63
    monkeypatch.setattr(figures, "record", lambda name: changed if name == "load-pmixed" else before(name))
    found = render.differing()
    assert {page.name for page in found} == {"README.md", "runbook.md"}
    (runbook,) = (text for page, text in found.items() if page.name == "runbook.md")
    assert "makes <!--=node_tokens-->630<!--/-->" in runbook
    assert "cost <!--=node_eur-->0.88<!--/--> EUR" in runbook


def test_every_figure_is_shown_and_every_record_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no page shows is nobody's, and goes."""
    before, used = figures.record, set[str]()

    def noted(name: str) -> record.MeasuredRecord:
        used.add(name)
        return before(name)

    monkeypatch.setattr(figures, "record", noted)
    names = {name for page in render.pages() for name, _ in render.REGION.findall(page.read_text())}
    for name in names:
        figures.FIGURES[name]()
    assert names == set(figures.FIGURES)
    assert {file.stem for file in record.MEASURED.glob("*.json")} - used == set()


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("a token costs <!--=cost-->1 plain one", "needs its <!--/-->"),
        ("<!--/--> 1", "needs its <!--/-->"),
        ("a <!--=cost-->1 <!--=cost-->1<!--/--> one", "needs its <!--/-->"),
        ("a token costs <!--=price-->1<!--/--> plain one", "price: no function"),
        ("a token costs <!--=lost-->1<!--/--> plain one", "lost: its record has no 'ratio'"),
        ("<!--=cost-->1<!--/--> plain tokens", "begin the line with other text"),
        ("- <!--=cost-->1<!--/--> plain tokens", "begin the line with other text"),
    ],
)
def test_marks_that_show_nothing_are_refused(page: str, error: str) -> None:
    measured: dict[str, str] = {}
    with pytest.raises(ValueError, match=error):
        render.rendered(page, {"cost": lambda: "2", "lost": lambda: measured["ratio"]})


def test_text_between_marks_is_replaced() -> None:
    page = "costs <!--=cost-->1<!--/-->, or\n\n<!--=table-->\n<!--/-->\n"
    shown = render.rendered(page, {"cost": lambda: "2", "table": lambda: "\n| a |\n| --- |\n"})
    assert shown == "costs <!--=cost-->2<!--/-->, or\n\n<!--=table-->\n| a |\n| --- |\n<!--/-->\n"


def test_a_measurement_is_kept_with_its_command(tmp_path: Path) -> None:
    printed = tmp_path / "printed.json"
    printed.write_text('{"ratio": 0.8}')
    command = ["privmix", "evaluate", "task", "--output", "my task"]
    record.main("task", command, "one idle core", result=printed, folder=tmp_path)
    kept = record.MeasuredRecord.read("task", tmp_path)
    assert kept.figures == {"ratio": 0.8}
    assert kept.command == "privmix evaluate task --output 'my task'"
    assert (kept.machine, kept.source) == ("one idle core", "printed")
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", kept.commit)


def test_a_command_that_prints_no_json_leaves_the_record(tmp_path: Path) -> None:
    kept = record.MeasuredRecord.read("corpus")
    kept.write("corpus", tmp_path)
    with pytest.raises(typer.BadParameter, match="give it --json"):
        record.main("corpus", ["python", "-c", "print('fast')"], "one idle core", folder=tmp_path)
    assert record.MeasuredRecord.read("corpus", tmp_path) == kept


def test_a_command_is_run_and_what_it_prints_is_kept(tmp_path: Path) -> None:
    command = ["python", "-c", f"print('{json.dumps({'ratio': 1})}')"]
    record.main("ratio", command, "one idle core", folder=tmp_path)
    assert record.MeasuredRecord.read("ratio", tmp_path).figures == {"ratio": 1}
