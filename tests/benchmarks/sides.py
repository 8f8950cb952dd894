"""Compares the engine with that of another checkout, both in one run: `python -m tests.benchmarks.sides BEFORE`.

BEFORE is the root of the other checkout (`git worktree add ../before COMMIT`). Each side has a process, and rounds of
steps alternate, so that other load affects both. For each `CONTEXT,m` (m parts are drawn for each sequence; 0 stands
for public rows alone):

- `step_ms`: the milliseconds of a step.
- `host_ms`: those that the stepping thread computes outside the model's layers and its head: the scheduler, requests
  and batches.
- `weigh_ms`: those from rows to sampling weights, by PMixed for m = 1 and by the exponential mechanism for more; 0
  where an engine's shard does not weigh.
- `processor_ms`: those of the processor for rows and weights, of all threads. With `--threads 1`, which never wait for
  each other, other load adds little to it.
- `ratio`: of this checkout's over the other's, of each.

Values are medians, `least` those of the fastest steps. `--model tiny` has next to no layers, so the host's time is
what is left; `--model default` is the model that the package brings.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import typer

from privmix.training.public_model import resolve
from privmix_cluster.options import JsonOption
from privmix_cluster.topology import cpu_environment
from tests.benchmarks.options import show
from tests.ensembles import usual_layers, write_adapters
from tests.tiny import write_tiny_llama

SIDE = Path(__file__).with_name("engine_side.py")
HERE = Path(__file__).parents[2]
WARM_UPS = 3
SPARE = 256


class SideProcess:
    """A process with the engine of one checkout."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, question: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine's process ended with {self._process.wait()}")
        return json.loads(line)


@contextmanager
def started(checkout: Path, given: Mapping[str, Any], threads: int) -> Iterator[SideProcess]:
    paths = {"PYTHONPATH": f"{checkout}/services:{checkout}/cluster", "PYTHONSAFEPATH": "1"}
    environment = {**os.environ, **cpu_environment(threads), **paths}
    command = [sys.executable, str(SIDE), json.dumps(given)]
    process = subprocess.Popen(
        command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        side = SideProcess(process)
        side.answer()
        yield side
    finally:
        process.kill()
        process.wait()


def compared(
    sides: Mapping[str, SideProcess], sequences: int, context: int, readers: int, steps: int, rounds: int
) -> dict[str, Any]:
    """Measures one cell on all sides."""
    cell = [sequences, context, readers]
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for side in sides.values():
        side.ask({"steps": WARM_UPS, "cell": cell})
    for _ in range(rounds):
        for name, side in sides.items():
            found[name] += side.ask({"steps": steps, "cell": cell})
    for side in sides.values():
        side.ask({"end": [context, readers]})
    values: dict[str, Any] = {}
    for place, kind in enumerate(("step_ms", "host_ms", "weigh_ms", "processor_ms")):
        columns = {name: [1000 * each[place] for each in own] for name, own in found.items()}
        values[kind] = {name: round(statistics.median(own), 2) for name, own in columns.items()}
        values[kind] |= {f"{name}, least": round(min(own), 2) for name, own in columns.items()}
        if "before" in columns and any(columns["before"]):
            ratios = (measure(columns["now"]) / measure(columns["before"]) for measure in (statistics.median, min))
            values[kind] |= zip(("ratio", "ratio, least"), (round(ratio, 3) for ratio in ratios), strict=True)
    return values


def main(
    before: Annotated[
        Path | None, typer.Argument(help="The root of the other checkout; none measures this one.")
    ] = None,
    model: Annotated[Literal["tiny", "default"], typer.Option()] = "tiny",
    parts: Annotated[int, typer.Option(min=1)] = 4,
    sequences: Annotated[int, typer.Option(min=1)] = 64,
    context: Annotated[list[int], typer.Option(min=1, help="Tokens of a sequence. Repeatable.")] = [192, 2000],  # noqa: B006
    readers: Annotated[list[int], typer.Option(min=0, help="Parts drawn for a sequence. Repeatable.")] = [0, 1],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="In a round.")] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 6,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of a process. Default: one for tiny, else all cores.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few sequences, this checkout alone.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures and prints the values of this module's description."""
    if quick:
        sequences, context, steps, rounds = 2, [16], 2, 1
    with tempfile.TemporaryDirectory(prefix="sides-") as name, ExitStack() as stack:
        folder = Path(name)
        length = max(context) + SPARE
        names = [f"part-{index:03d}" for index in range(parts)]
        if model == "tiny":
            path = write_tiny_llama(folder / "model", layers=2, context=length)
            write_adapters(folder / "parts", names, path, layers=1)
        else:
            path = resolve()
            write_adapters(folder / "parts", names, path, layers=usual_layers(path))
        cores = psutil.cpu_count() or 1
        given = {
            "model": str(path),
            "adapters": str(folder / "parts"),
            "context_length": length,
            "cache_gib": 1.0 if model == "tiny" else 2.0,
        }
        checkouts = {"now": HERE, **({} if before is None or quick else {"before": before.resolve()})}
        sides = {
            side: stack.enter_context(started(checkout, given, threads or (1 if model == "tiny" else cores)))
            for side, checkout in checkouts.items()
        }
        result = {}
        for tokens in context:
            for count in readers:
                result[f"{tokens},{count}"] = compared(sides, sequences, tokens, count, steps, rounds)
                print(f"{tokens},{count}: {result[f'{tokens},{count}']}", file=sys.stderr, flush=True)
    show(result, as_json)


if __name__ == "__main__":
    typer.run(main)
