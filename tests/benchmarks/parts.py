"""Measures the cost of many parts for one engine: `python -m tests.benchmarks.parts --parts 1000 --json`.

- `start_s`: time to start an engine with all adapters.
- `resident_gib`, `adapters_gib`: memory of the process after the start, and of its adapters' weights, which is in
  proportion to the layers that a part changes (`--layers`).
- `step_ms`: median time of a step, by `sequences x part rows per sequence`.
- `part_row_over_public_row`: the time that a part row adds to a step, over the time that a public row of another
  sequence adds; alternating batches with equal numbers of rows.

The adapters are random; a few files are loaded many times under different names.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from privmix.engine.engine import PUBLIC, EngineSettings, Request
from privmix.engine.vllm_engine import VllmEngine
from privmix.training.public_model import resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import LayersOption, show
from tests.ensembles import usual_layers, write_adapters

FILES = 4
WARM_UP = 3


class PartBatch:
    """Advances sequences together."""

    def __init__(self, engine: VllmEngine, names: Sequence[str], prompt_tokens: int) -> None:
        self._engine, self._names, self._prompt_tokens = engine, names, prompt_tokens
        self._random = random.Random(0)
        self._started = 0

    def step_seconds(self, sequences: int, part_rows: int, steps: int) -> float:
        """Returns the median time of a step with a public row and some newly drawn part rows per sequence."""
        self._started += 1
        contexts = [[self._random.randrange(10, 40_000) for _ in range(self._prompt_tokens)] for _ in range(sequences)]
        times = []
        for step in range(WARM_UP + steps):
            requests = [
                Request(
                    f"{self._started}-{index}", tuple(context), (PUBLIC, *self._random.sample(self._names, part_rows))
                )
                for index, context in enumerate(contexts)
            ]
            started = time.perf_counter()
            self._engine.next_token(requests)
            if step >= WARM_UP:
                times.append(time.perf_counter() - started)
            for context in contexts:
                context.append(self._random.randrange(10, 40_000))
        for request in requests:
            self._engine.drop_caches(request.sequence)
        return statistics.median(times)

    def part_row_over_public_row(self, sequences: int, part_rows: int, steps: int, rounds: int = 3) -> float:
        ratios = []
        for _ in range(rounds):
            plain = self.step_seconds(sequences, 0, steps)
            with_parts = self.step_seconds(sequences, part_rows, steps)
            more_sequences = self.step_seconds(sequences * (1 + part_rows), 0, steps)
            ratios.append((with_parts - plain) / (more_sequences - plain))
        return statistics.median(ratios)


@contextmanager
def only_the_result() -> Iterator[None]:
    """Sends to standard error what vLLM logs on standard output, which has the result alone."""
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def measure(
    parts: int, layers: int | None, prompt_tokens: int, steps: int, cells: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    model = resolve()
    layers = layers or usual_layers(model)
    names = [f"part-{index:04d}" for index in range(parts)]
    with tempfile.TemporaryDirectory() as folder:
        files = [f"file-{index}" for index in range(FILES)]
        written = list(write_adapters(Path(folder), files, model, layers=layers).values())
        adapters = {name: written[index % FILES] for index, name in enumerate(names)}
        started = time.perf_counter()
        engine = VllmEngine(EngineSettings(model, context_length=1024, cache_gib=2, adapters=adapters))
        start_s = time.perf_counter() - started
    bench = PartBatch(engine, names, prompt_tokens)
    report = {
        "parts": parts,
        "layers": layers,
        "prompt_tokens": prompt_tokens,
        "start_s": round(start_s, 1),
        "resident_gib": round(psutil.Process().memory_info().rss / 2**30, 2),
        "adapters_gib": round(engine._worker("adapter_bytes") / 2**30, 3),
        "step_ms": {f"{n} x {rows}": round(1e3 * bench.step_seconds(n, rows, steps), 1) for n, rows in cells},
        "part_row_over_public_row": {
            f"{n} x {rows}": round(bench.part_row_over_public_row(n, rows, steps), 2) for n, rows in cells if rows
        },
    }
    engine.close()
    return report


def main(
    parts: Annotated[int, typer.Option(min=1)] = 1000,
    layers: LayersOption = None,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 12,
    quick: Annotated[bool, typer.Option(help="One small cell.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures one engine with many parts."""
    if quick:
        parts, prompt_tokens, steps = 16, 16, 2
    cells = [(2, 0), (2, 2)] if quick else [(1, 0), (1, 8), (1, 16), (8, 0), (8, 8), (32, 0), (32, 8)]
    with only_the_result():
        report = measure(parts, layers, prompt_tokens, steps, cells)
    show(report, as_json)


if __name__ == "__main__":
    typer.run(main)
