"""Checks and measures the engine on a GPU, in at most ten minutes: `python -m tests.benchmarks.gpu --json`.

Its stages run one after another, each in processes of their own, which are stopped after a time; each prints its
values when it ends, and none stops the others. A process imports what it needs while the one before it measures.
`--stage` selects some of them. Models have the shapes of SmolLM2-135M and of a Llama of 8B parameters, and random
weights; readers change the last half of the layers. S = 64 sequences.

- `rates`: what the device does: bytes a second (read and written) of a copy, operations a second of a product in
  bfloat16; and `copy_ms`, to bring p0 of all sequences to the host, into new pages and as a shard does.
- `kernels`: those of the reduction and of LoRA against float64, with their milliseconds.
- `exact`: `replays` has the number of rows of captured steps whose bits differ from those of the same code run
  eagerly; `agreement` the distance of captured rows from those of transformers in float32 (`gpu_stages.agreement`).
  On a CPU a stand-in for graphs is replayed.
- `vllm`: milliseconds of a step of vLLM's own `LLM.generate` for both models, without compilation, which this engine
  does not use either.
- `small`: SmolLM2's shape. `ms,CONTEXT` has the milliseconds of a step by the number of parts drawn for each sequence:
  `rows` until the public tokens are known, `reduced` with the sums of the exponential mechanism, as one of several
  groups of parts sends them, `sampled` with the tokens that the only group samples by it. 0 stands for public rows
  alone. `stages_ms` has those of a step by stage on an idle device; the device is idle between
  two stages, so that their sum is more than a step. `profile` says for 16 parts how long the device is busy in a step,
  and with what. Each engine also states its start and its memory.
- `large`: the same for 8B parameters, with contexts of 192 and 1,024 tokens.
- `quarter`: the same for readers of its last quarter of the layers, all parts and 1,024 tokens.
- `start`: seconds to the first private rows in a new process after its imports, when all kernels have been compiled.
- `before`: `small` with the engine of another checkout, which `--before` names.
- `batches`: the number of rows that have other bits in a larger batch: with batch-invariant kernels
  (`engine.batch_invariant`), and with ordinary ones. It is the last, so that it takes no time from the others.
- `families` (only on request): `agreement` for the head in the model's type, experts and texts. `compiled` (likewise):
  `vllm` as it is by default.

`ratios` compares a token with one of public rows alone, and of vLLM; `floors` has the least milliseconds of a step on
this device (`tests.benchmarks.floors`), and by how much the measured step exceeds them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from privmix.coordinator.settings import StepSettings
from privmix_cluster.options import JsonOption
from tests.benchmarks.floors import DecodeStep, Rates, floors_ms
from tests.benchmarks.options import show
from tests.benchmarks.shapes import SHAPES, write_model, write_readers

ROOT = Path(__file__).parents[2]
TAIL = 1000
"""The number of last characters of a failed process's output that the report has."""
NAMED_ERRORS = 4
ERROR = re.compile(r"\b\w*(Error|Exception): ")
SLOWER_CPU = 10
"""By what all limits are multiplied on a CPU."""
STAGES = ("rates", "kernels", "exact", "small", "vllm", "large", "quarter", "before", "start", "batches")
"""What is right comes before how fast it is. Where the time ends, the last ones say that none was left."""
PLAINEST_VLLM = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""What this engine sets too, where vLLM's defaults fail."""
ON_REQUEST = ("families", "compiled")


@dataclass(frozen=True)
class GpuSize:
    """Holds the size of all measurements.

    Attributes:
        small, large, quarter: the shapes of the models.
        numbers: of parts that are drawn for each sequence.
        few: the number of these for what is measured once.
        contexts: the lengths for the large model, of which the first is that for the small one.
        linked: how many of the large model's readers differ.
    """

    small: str = "SmolLM2-135M"
    large: str = "Llama-8B"
    quarter: str = "Llama-8B-quarter"
    parts: int = 64
    sequences: int = 64
    numbers: tuple[int, ...] = (1, 16, 64)
    few: int = 16
    contexts: tuple[int, ...] = (192, 1024)
    steps: int = 24
    compared: int = 40
    linked: int = 4
    copied: int = 2**31
    side: int = 8192


QUICK = GpuSize(
    small="tiny",
    large="tiny",
    quarter="tiny",
    parts=4,
    sequences=3,
    numbers=(1, 2),
    few=2,
    contexts=(16, 24),
    steps=3,
    compared=4,
    linked=2,
    copied=2**20,
    side=64,
)


@dataclass(frozen=True)
class Measurement:
    """Names a measurement in a process of its own.

    Attributes:
        function, arguments: of `gpu_stages`.
        limit_s: seconds after which the process is stopped.
        again: if the process fails, it runs once more with this environment.
    """

    name: str
    function: str
    arguments: Mapping[str, Any]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    again: Mapping[str, str] | None = None


class Bench:
    """Makes the cells of each stage, with the files that they need."""

    def __init__(self, size: GpuSize, folder: Path, before: Path | None) -> None:
        self._size = size
        self._folder = folder
        self._checkout = before
        names = [f"part-{index:03d}" for index in range(size.parts)]
        self._shapes = {"small": size.small, "large": size.large, "quarter": size.quarter}
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
            "context": max(self._contexts(which)),
            "readers": readers,
            "steps": size.steps,
        }

    def _contexts(self, which: str) -> Sequence[int]:
        contexts = self._size.contexts
        return {"small": contexts[:1], "large": contexts, "quarter": contexts[-1:]}[which]

    def rates(self) -> Iterator[Measurement]:
        size = self._size
        vocabulary = SHAPES[size.small].vocabulary
        arguments = {"copied": size.copied, "side": size.side, "sequences": size.sequences, "vocabulary": vocabulary}
        yield Measurement("device", "rates", arguments, 60)

    def kernels(self) -> Iterator[Measurement]:
        size = self._size
        yield Measurement("reduction", "reduction_kernels", {}, 90)
        arguments = {"sequences": size.sequences, "numbers": size.numbers, "parts": size.parts}
        yield Measurement("lora", "lora_kernels", {"shapes": (size.small, size.large), **arguments}, 90)

    def exact(self) -> Iterator[Measurement]:
        yield Measurement("replays", "replays", {"case": {**self._case("small", self._size.few), "steps": 3}}, 90)
        yield self._agreement("agreement", ("float32",), 120)

    def families(self) -> Iterator[Measurement]:
        yield self._agreement("agreement", ("model", "float32", "experts", "texts"), 400)

    def _agreement(self, name: str, kinds: Sequence[str], limit_s: float) -> Measurement:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        arguments = {"contexts": self._size.compared, "kinds": kinds, "folder": str(folder)}
        return Measurement(name, "agreement", {"case": self._case("small", 1), **arguments}, limit_s)

    def small(self) -> Iterator[Measurement]:
        yield self._speed("all", "small", self._size.numbers, 90)

    def large(self) -> Iterator[Measurement]:
        yield self._speed("all", "large", self._size.numbers, 150)

    def quarter(self) -> Iterator[Measurement]:
        yield self._speed("all", "quarter", self._size.numbers[-1:], 100)

    def before(self) -> Iterator[Measurement]:
        if self._checkout is not None:
            numbers = [readers for readers in self._size.numbers if readers <= self._size.few]
            cell = self._speed("m<=few", "small", numbers, 240)
            yield replace(cell, environment={"PYTHONPATH": f"{self._checkout}/services:{self._checkout}/cluster"})

    def _speed(self, name: str, which: str, numbers: Sequence[int], limit_s: float) -> Measurement:
        case = self._case(which, max(numbers))
        profiled = self._size.few if self._size.few in numbers else max(numbers)
        arguments = {"case": case, "numbers": numbers, "contexts": self._contexts(which), "profiled": profiled}
        return Measurement(name, "speed", arguments, limit_s)

    def vllm(self) -> Iterator[Measurement]:
        for which in ("large", "small"):
            case = self._case(which, 0)
            name, arguments = f"{which},{case['context']}", {"case": case, "compiled": False}
            yield Measurement(name, "plain_vllm", arguments, 75, again=PLAINEST_VLLM)

    def compiled(self) -> Iterator[Measurement]:
        case = self._case("small", 0)
        yield Measurement("small", "plain_vllm", {"case": case, "compiled": True}, 300)

    def start(self) -> Iterator[Measurement]:
        yield Measurement("small", "restart", {"case": self._case("small", self._size.few)}, 60)

    def batches(self) -> Iterator[Measurement]:
        case = {"case": self._case("small", self._size.few)}
        yield Measurement("invariant", "batches", case, 120, {"VLLM_BATCH_INVARIANT": "1"})
        yield Measurement("ordinary", "batches", case, 100)


class Cell:
    """Runs a measurement in a process of its own, which imports what it needs while another one measures."""

    def __init__(self, cell: Measurement, folder: Path) -> None:
        self._cell = cell
        self._result, self._log = folder / "result.json", folder / "log"
        given = folder / "cell.json"
        given.write_text(json.dumps({"function": cell.function, "arguments": cell.arguments}))
        own = (str(ROOT / "services"), str(ROOT / "cluster"), str(ROOT))
        paths = [cell.environment.get("PYTHONPATH", ""), *own, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **cell.environment,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # no stage draws tokens, and a bare machine has no FlashInfer
            "PYTHONSAFEPATH": "1",  # another checkout's packages come before those of the working directory
        }
        command = [sys.executable, "-m", "tests.benchmarks.gpu_stages", str(given), str(self._result)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def measure(self, slower: int, until: float) -> dict[str, Any]:
        """Returns the values with their seconds, and with `error` if the process failed or was stopped.

        Args:
            slower: by what the limit is multiplied.
            until: the time at which it is stopped at the latest (`time.monotonic`).
        """
        limit_s = min(slower * self._cell.limit_s, until - time.monotonic())
        if limit_s <= 0:
            return {"error": "no time was left"}
        began = time.monotonic()
        error = None
        try:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError), self._process.stdin as start:
                start.write(b"\n")
            if self._process.wait(limit_s):
                error = f"ended with {self._process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"was stopped after {limit_s:.0f} s"
        finally:
            self.end()
        values: dict[str, Any] = json.loads(self._result.read_text()) if self._result.exists() else {}
        if error is not None:
            values["error"] = f"{error}: {_errors(self._log.read_text())}"
        return {**values, "seconds": round(time.monotonic() - began, 1)}

    def end(self) -> None:
        """Ends the process with all that it has started, which may hold the device's memory."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def measure(cells: Sequence[tuple[str, Measurement]], slower: int, until: float) -> dict[str, Any]:
    """Runs cells of stages one after another; returns the values of each by stage and name."""
    report: dict[str, Any] = {stage: {} for stage, _ in cells}
    with ExitStack() as started, tempfile.TemporaryDirectory(prefix="cells-") as name:

        def begun(cell: Measurement) -> Cell:
            process = Cell(cell, Path(tempfile.mkdtemp(dir=name)))
            started.callback(process.end)
            return process

        def measured(stage: str, cell: Measurement, process: Cell) -> dict[str, Any]:
            value = process.measure(slower, until)
            print(f"{stage},{cell.name}: {json.dumps(value)}", file=sys.stderr, flush=True)
            return value

        processes: list[Cell] = []
        for index, (stage, cell) in enumerate(cells):
            processes += [begun(coming) for _, coming in cells[len(processes) : index + 2]]
            value = measured(stage, cell, processes[index])
            if "error" in value and cell.again is not None:
                other = replace(cell, environment=cell.again)
                value = {"again": cell.again, **measured(stage, other, begun(other))}
            report[stage][cell.name] = value
    return report


def _errors(log: str) -> str:
    """Returns the lines of a log that name errors, and its end."""
    named = [line for line in log.splitlines() if ERROR.search(line)]
    return "\n".join([*(line[-300:] for line in named[:NAMED_ERRORS]), log[-TAIL:]])


def summary(report: Mapping[str, Any], size: GpuSize) -> dict[str, Any]:
    """Returns the ratios to a plain token, and the floors on this device, of what was measured."""
    found: dict[str, Any] = {"ratios": {}, "floors": {}}
    device = report.get("rates", {}).get("device", {})
    for which in ("small", "large", "quarter", "before"):
        for cell in report.get(which, {}).values():
            for key, by_readers in cell.items():
                if key.startswith("ms,"):
                    context = int(key.partition(",")[2])
                    _compare(found, which, context, by_readers, report.get("vllm", {}), device, size)
    return found


def _compare(
    found: dict[str, Any],
    which: str,
    context: int,
    by_readers: Mapping[str, Mapping[str, float]],
    vllm: Mapping[str, Any],
    device: Mapping[str, Any],
    size: GpuSize,
) -> None:
    model = {"large": size.large, "quarter": size.quarter}.get(which, size.small)
    same = "small" if model == size.small else "large"
    plain, sampled = by_readers["0"]["rows"], by_readers["0"].get("sampled")
    alone = vllm.get(f"{same},{context}", {}).get("ms")
    for readers, took in by_readers.items():
        name = f"{which},{context},{readers}"
        found["ratios"][name] = {
            "tokens_per_s": round(1000 * size.sequences / took.get("sampled", took["rows"])),
            **{f"{kind} over plain": round(ms / plain, 2) for kind, ms in took.items()},
            **({} if sampled is None else {"sampled over sampled": round(took["sampled"] / sampled, 2)}),
            **({} if alone is None else {f"{kind} over vLLM": round(ms / alone, 2) for kind, ms in took.items()}),
        }
        if "bytes" in device:
            step = DecodeStep(size.sequences, int(readers), context, size.parts)
            rates = Rates(device["bytes"], device["operations"])
            floors = floors_ms(SHAPES[model], step, rates)
            over = {"rows": took["rows"] / floors["rows"], "all": took.get("sampled", took["rows"]) / floors["all"]}
            found["floors"][name] = {
                "ms": {stage: round(ms, 3) for stage, ms in floors.items()},
                "measured_over_floor": {stage: round(ratio, 2) for stage, ratio in over.items()},
            }


def main(
    stage: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join((*STAGES, *ON_REQUEST))}; repeatable. Default: the first {len(STAGES)}."),
    ] = None,
    before: Annotated[Path | None, typer.Option(help="The root of another checkout, for the stage `before`.")] = None,
    limit_s: Annotated[float, typer.Option(min=1, help="The seconds after which no stage goes on.")] = 540,
    on_cpu: Annotated[bool, typer.Option("--on-cpu", help="Try this program out where there is no GPU.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A small case, without a GPU too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures and prints the values of this module's description."""
    if unknown := sorted(set(stage or ()) - {*STAGES, *ON_REQUEST}):
        raise typer.BadParameter(f"--stage: {', '.join(unknown)}; use {', '.join((*STAGES, *ON_REQUEST))}")
    if not torch.cuda.is_available() and not (on_cpu or quick):
        show({"skipped": "no CUDA GPU is here"}, as_json)
        return
    slower = 1 if torch.cuda.is_available() else SLOWER_CPU
    until = time.monotonic() + slower * limit_s
    size = QUICK if quick else GpuSize()
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        bench = Bench(size, Path(name), before and before.resolve())
        cells = [(wanted, cell) for wanted in stage or STAGES for cell in bench.cells(wanted)]
        found = measure(cells, slower, until)
    show({"recovery_s": StepSettings().recovery_s, **found, **summary(found, size)}, as_json)


if __name__ == "__main__":
    typer.run(main)
