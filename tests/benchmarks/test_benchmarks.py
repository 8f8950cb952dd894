"""Claim: each benchmark runs in its quick form."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.benchmarks import gpu, private_base

ROOT = Path(__file__).parents[2]

slow = pytest.mark.slow


def figures(name: str, *options: object) -> dict[str, Any]:
    """Returns what `python -m tests.benchmarks.NAME --quick` prints."""
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--quick", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))


def keys(measured: Mapping[str, Any], *names: str) -> None:
    """Checks that these figures are there, and are numbers above 0."""
    assert set(names) <= set(measured)
    for name in names:
        assert measured[name] > 0, name


@slow
@pytest.mark.timeout(900)
def test_the_neighbours() -> None:
    measured = figures("neighbours", "--json")
    assert len(measured["ways"]) == 5
    for name, way in measured["ways"].items():
        assert way["failed"] == 0, name
        assert way["sent"] > 0, name
        keys(way, "ratio", "p50", "alone_s", "beside_s")


@slow
def test_ensembles_on_a_private_base(tmp_path: Path) -> None:
    """Its gains, of two users and two parts, mean nothing. What is there is not measured again."""
    measured = figures("private_base", "--output", tmp_path, "--json")
    (rows,) = measured["corpora"]["demo"].values()
    bases = {row["base_epsilon"] for row in rows if row["method"] == "DP-SGD"}
    assert 8.0 in bases
    assert 1 <= len(bases) <= 1 + private_base.Size().fractions
    methods = ("exponential", "individual", "not private")
    assert {(row["method"], row["base_epsilon"]) for row in rows if row["parts"]} == {
        (method, base) for method in methods for base in {None, *bases} - {8.0}
    }
    for row in rows:
        assert len(row["gain"]) == len(row["over_dp_sgd"]) == 3
        assert len(row["runs"]) == measured["size"]["runs"]
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}
    assert figures("private_base", "--output", tmp_path, "--json") == measured
    assert files == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}


def test_a_corpus_without_measured_parts_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """`privmix plan` adds the gain of a base to that of parts on the same corpus."""
    with pytest.raises(typer.BadParameter, match="the table of parts lacks other"):
        private_base.benchmark(tmp_path / "output", tmp_path / "other.jsonl", write=True)
    assert not (tmp_path / "output").exists()


@slow
def test_the_table_of_gains(tmp_path: Path) -> None:
    measured = figures("gain", "--output", tmp_path)
    (by_kind,) = (table for table in measured.values() if isinstance(table, dict))
    assert len(by_kind) == 2
    for kind in by_kind.values():
        assert set(kind["corpora"]["demo"]) == {"ensemble_gain", "kept", "gain_by_part_tokens"}


@slow
def test_trainings() -> None:
    measured = figures("train", "--json")
    kinds = measured["kinds"]
    keys(kinds["over_all_layers"], "reader, last half", "reader, last quarter", "plain LoRA", "plain LoRA by PEFT")
    keys(measured["dp_sgd"], "64")


@slow
@pytest.mark.timeout(1800)
def test_the_engine_by_stage() -> None:
    """Without a GPU, `exact` replays the stand-in for graphs, so all that a GPU will run has run once."""
    measured = figures("gpu", "--json")
    for stage in gpu.STAGES:
        for name, cell in measured[stage].items():
            assert "error" not in cell, (stage, name)
    replays = [each for each in measured["exact"]["replays"].values() if isinstance(each, dict)]
    assert len(replays) == 4, "of 3 sequences and of 1, each with parts and without"
    assert all(each["rows"] and not each["rows_that_differ"] for each in replays)
    for cell in ("small,16", "large,24"):
        keys(measured["vllm"][cell], "ms")
        for readers in ("1", "2"):
            ratios = measured["ratios"][f"{cell},{readers}"]
            keys(ratios, "tokens_per_s", "rows over plain", "sampled over sampled", "sampled over vLLM")
    keys(measured["batches"]["ordinary"], "rows_compared")
    assert "batch-invariant kernels for GPUs" in measured["batches"]["invariant"]["skipped"]


def test_a_stage_that_fails_says_why_and_stops_no_other() -> None:
    cells = (gpu.Measurement("slow", "replays", {}, 0.1), gpu.Measurement("wrong", "replays", {"cases": {}}, 600))
    found = gpu.measure([("exact", cell) for cell in cells], 1, time.monotonic() + 600)["exact"]
    assert "was stopped after 0 s" in found["slow"]["error"]
    assert "TypeError" in found["wrong"]["error"]


@slow
def test_a_step_outside_the_engines() -> None:
    measured = figures("host_path", "--json")
    for cell in measured.values():
        keys(cell, "step_ms", "gap_ms", "coordinator_ms", "shards_ms", "bytes")


@slow
@pytest.mark.timeout(900)
def test_the_whole_service() -> None:
    """Starts two clusters of Ray, one for each side, with the options that a GPU will be measured with."""
    measured = figures("load", "--json", "--shape", "SmolLM2-135M", "--shards", 2)
    ((cell, ratio),) = measured["private_over_plain"].items()
    assert ratio > 0
    for side in ("private", "plain"):
        assert measured["cells"][cell][side]["errors"] == {}
