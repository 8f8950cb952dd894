"""Checks and measures the engine on a GPU: `python -m tests.benchmarks.gpu --json`.

Its stages run one after another, each cell in a process of its own, which is stopped after a time; none stops the
others. `--stage` selects some of them. Models have the shapes of SmolLM2-135M and of a Llama of 8B parameters, and
random weights; readers change the last half of the layers. S = 64 sequences.

- `exact`: the number of rows of captured steps whose bits differ from those of the same code run eagerly. On a CPU a
  stand-in for graphs is replayed. `tests/services/engine/test_conformance.py` compares rows with a plain forward pass.
- `small`: SmolLM2's shape. `ms,CONTEXT` has the milliseconds of a step by the number of parts drawn for each sequence:
  `rows` until the public tokens are known, `sampled` with the tokens that the only group of parts samples by the
  exponential mechanism. 0 stands for public rows alone.
- `vllm`: milliseconds of a step of vLLM's own `LLM.generate`, without compilation, which this engine does not use.
- `large`: as `small` for 8B parameters, with contexts of 192 and 1,024 tokens.
- `batches`: the number of rows that have other bits in a larger batch: with batch-invariant kernels
  (`VLLM_BATCH_INVARIANT=1`), and with ordinary ones.

`ratios` compares a token with one of public rows alone, and of vLLM.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from privmix_cluster.options import JsonOption
from tests.benchmarks.options import show
from tests.benchmarks.shapes import SHAPES, write_model, write_readers

ROOT = Path(__file__).parents[2]
TAIL = 3000
"""The number of last characters of a failed process's output that the report has."""
SLOWER_CPU = 10
"""By what all limits are multiplied on a CPU."""
STAGES = ("exact", "small", "vllm", "large", "batches")
"""What is right comes before how fast it is. Where the time ends, the last ones say that none was left."""


@dataclass(frozen=True)
class GpuSize:
    """Holds the size of all measurements.

    Attributes:
        small, large: the shapes of the models.
        numbers: of parts that are drawn for each sequence.
        few: the number of these for what is measured once.
        contexts: the lengths for the large model, of which the first is that for the small one.
        linked: how many of the large model's readers differ.
    """

    small: str = "SmolLM2-135M"
    large: str = "Llama-8B"
    parts: int = 64
    sequences: int = 64
    numbers: tuple[int, ...] = (1, 16, 64)
    few: int = 16
    contexts: tuple[int, ...] = (192, 1024)
    steps: int = 24
    linked: int = 4


QUICK = GpuSize("tiny", "tiny", 4, 3, (1, 2), 2, (16, 24), steps=3, linked=2)


@dataclass(frozen=True)
class Measurement:
    """Names a measurement in a process of its own.

    Attributes:
        function, arguments: of `gpu_stages`.
        limit_s: seconds after which the process is stopped.
    """

    name: str
    function: str
    arguments: Mapping[str, Any]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


class Bench:
    """Makes the cells of each stage, with the files that they need."""

    def __init__(self, size: GpuSize, folder: Path) -> None:
        self._size = size
        self._folder = folder
        names = [f"part-{index:03d}" for index in range(size.parts)]
        self._shapes = {"small": size.small, "large": size.large}
        for which, shape in self._shapes.items():
            write_model(folder / which, SHAPES[shape], weights=which == "small")
            write_readers(folder / f"{which}-readers", names, SHAPES[shape], None if which == "small" else size.linked)

    def cells(self, stage: str) -> list[Measurement]:
        return list(getattr(self, stage)())

    def _case(self, which: str, readers: int) -> dict[str, Any]:
        size = self._size
        return {
            "shape": self._shapes[which],
            "model": str(self._folder / which),
            "adapters": str(self._folder / f"{which}-readers"),
            "sequences": size.sequences,
            "context": self._contexts(which)[-1],
            "readers": readers,
            "steps": size.steps,
        }

    def _contexts(self, which: str) -> Sequence[int]:
        return self._size.contexts[: 1 if which == "small" else None]

    def exact(self) -> Iterator[Measurement]:
        yield Measurement("replays", "replays", {"case": {**self._case("small", self._size.few), "steps": 3}}, 120)

    def small(self) -> Iterator[Measurement]:
        yield self._speed("small", 120)

    def large(self) -> Iterator[Measurement]:
        yield self._speed("large", 180)

    def _speed(self, which: str, limit_s: float) -> Measurement:
        numbers = self._size.numbers
        arguments = {"case": self._case(which, max(numbers)), "numbers": numbers, "contexts": self._contexts(which)}
        return Measurement("all", "speed", arguments, limit_s)

    def vllm(self) -> Iterator[Measurement]:
        for which in ("large", "small"):
            case = self._case(which, 0)
            yield Measurement(f"{which},{case['context']}", "plain_vllm", {"case": case}, 100)

    def batches(self) -> Iterator[Measurement]:
        case = {"case": self._case("small", self._size.few)}
        yield Measurement("invariant", "batches", case, 150, {"VLLM_BATCH_INVARIANT": "1"})
        yield Measurement("ordinary", "batches", case, 130)


def measured(cell: Measurement, slower: int, until: float) -> dict[str, Any]:
    """Runs a measurement; returns its values with their seconds, and with `error` if it failed or was stopped.

    Args:
        slower: by what the limit is multiplied.
        until: the time at which it is stopped at the latest (`time.monotonic`).
    """
    limit_s = min(slower * cell.limit_s, until - time.monotonic())
    if limit_s <= 0:
        return {"error": "no time was left"}
    environment = {**os.environ, **cell.environment}
    began, error = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="cell-") as name:
        given, result, log = (Path(name) / file for file in ("cell.json", "result.json", "log"))
        given.write_text(json.dumps({"function": cell.function, "arguments": cell.arguments}))
        command = [sys.executable, "-m", "tests.benchmarks.gpu_stages", str(given), str(result)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            if process.wait(limit_s):
                error = f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"was stopped after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # what it has started may hold the device's memory
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        values: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        if error is not None:
            values["error"] = f"{error}: {log.read_text()[-TAIL:]}"
    return {**values, "seconds": round(time.monotonic() - began, 1)}


def measure(cells: Sequence[tuple[str, Measurement]], slower: int, until: float) -> dict[str, Any]:
    """Runs cells of stages one after another; returns the values of each by stage and name."""
    report: dict[str, Any] = {stage: {} for stage, _ in cells}
    for stage, cell in cells:
        report[stage][cell.name] = value = measured(cell, slower, until)
        print(f"{stage},{cell.name}: {json.dumps(value)}", file=sys.stderr, flush=True)
    return report


def ratios(report: Mapping[str, Any], size: GpuSize) -> dict[str, Any]:
    """Returns the ratios of what was measured to a plain token, and to one of vLLM alone."""
    found: dict[str, Any] = {}
    for which in ("small", "large"):
        for key, by_readers in report.get(which, {}).get("all", {}).items():
            if not key.startswith("ms,"):
                continue
            context = key.partition(",")[2]
            plain = by_readers["0"]
            alone = report.get("vllm", {}).get(f"{which},{context}", {}).get("ms")
            for readers, took in by_readers.items():
                found[f"{which},{context},{readers}"] = {
                    "tokens_per_s": round(1000 * size.sequences / took["sampled"]),
                    **{f"{kind} over plain": round(ms / plain["rows"], 2) for kind, ms in took.items()},
                    "sampled over sampled": round(took["sampled"] / plain["sampled"], 2),
                    **({f"{kind} over vLLM": round(ms / alone, 2) for kind, ms in took.items()} if alone else {}),
                }
    return found


def main(
    stage: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(STAGES)}; repeatable. Default: all.")] = None,
    limit_s: Annotated[float, typer.Option(min=1, help="The seconds after which no stage goes on.")] = 540,
    quick: Annotated[bool, typer.Option("--quick", help="A small case, without a GPU too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures and prints the values of this module's description."""
    if unknown := sorted(set(stage or ()) - set(STAGES)):
        raise typer.BadParameter(f"--stage: {', '.join(unknown)}; use {', '.join(STAGES)}")
    if not torch.cuda.is_available() and not quick:
        show({"skipped": "no CUDA GPU is here"}, as_json)
        return
    slower = 1 if torch.cuda.is_available() else SLOWER_CPU
    until = time.monotonic() + slower * limit_s
    size = QUICK if quick else GpuSize()
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        bench = Bench(size, Path(name))
        found = measure([(each, cell) for each in stage or STAGES for cell in bench.cells(each)], slower, until)
    show({**found, "ratios": ratios(found, size)}, as_json)


if __name__ == "__main__":
    typer.run(main)
