"""Checks and measures the engine on a GPU: `python -m tests.benchmarks.gpu --json`. Ends with a message without one.

- `rows_that_differ`: the number of rows whose bits differ between a request alone and requests beside other sequences,
  in batches of growing size, three times over; 0 with batch-invariant kernels
  (`engine.batch_invariant`).
- `tokens_per_second`: decoding speed of all sequences: `plain` with one row of the public model per token; `private`
  with rows of 1, 16 and all parts besides, by their number.
- `private_over_plain`: the ratios of these speeds.
- `invariant_over_ordinary`: the ratio of the speeds with batch-invariant kernels and with vLLM's ordinary ones, for
  rows of all parts.

vLLM reads the choice of kernels when it is imported, so each side runs in its own process, one after the other.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from cluster.options import JsonOption
from services.engine.engine import PUBLIC, Engine, EngineSettings, Request, create
from services.training.public_model import resolve
from tests.ensembles import usual_layers, write_adapters

CONTEXT = 512
BATCHES = (1, 3, 8, 17, 40)
"""Even batch-invariant kernels give other bits above some 44 sequences (vLLM #51187)."""
REPEATS = 3
SIDES = {"invariant": "1", "ordinary": "0"}


@dataclass(frozen=True)
class Load:
    model: Path
    adapters: Mapping[str, Path]
    sequences: int
    steps: int
    prompt: int


def measure(load: Load) -> dict[str, Any]:
    """Measures one side. The environment of the process chooses the kernels."""
    engine = create(EngineSettings(model=load.model, adapters=load.adapters, context_length=CONTEXT))
    try:
        compared, different = compare_batches(engine, load)
        plain, names = tokens_per_second(engine, load, ()), tuple(load.adapters)
        numbers = sorted({1, min(16, len(names)), len(names)})
        private = {str(number): tokens_per_second(engine, load, names[:number]) for number in numbers}
    finally:
        engine.close()
    return {
        "rows_compared": compared,
        "rows_that_differ": different,
        "tokens_per_second": {"plain": plain, "private": private},
        "private_over_plain": {number: speed / plain for number, speed in private.items()},
    }


def compare_batches(engine: Engine, load: Load) -> tuple[int, int]:
    """Returns the number of rows that were repeated in larger batches, and how many of them have different bits."""
    names = (PUBLIC, *load.adapters)
    alone = engine.next_token([Request("alone", prompt_of(engine, load, 0), names)]).clone()
    engine.release("alone")
    compared = different = 0
    for size in (size for size in BATCHES if size <= load.sequences):
        for _ in range(REPEATS):
            requests = [Request(f"beside-{index}", prompt_of(engine, load, index), names) for index in range(size)]
            rows = engine.next_token(requests)[: len(names)]
            compared += len(names)
            different += int((rows != alone).any(dim=-1).sum())
            for request in requests:
                engine.release(request.sequence)
    return compared, different


def tokens_per_second(engine: Engine, load: Load, adapters: tuple[str, ...]) -> float:
    """Decodes all sequences together, greedily by the public row, after the prefill of their prompts."""
    texts = {f"text-{index}": list(prompt_of(engine, load, index)) for index in range(load.sequences)}
    rows_each = 1 + len(adapters)
    began = 0.0
    for step in range(load.steps + 1):
        if step == 1:
            began = time.perf_counter()
        requests = [Request(name, tuple(tokens), (PUBLIC, *adapters)) for name, tokens in texts.items()]
        following = engine.next_token(requests)[::rows_each].argmax(dim=-1).tolist()
        for tokens, token in zip(texts.values(), following, strict=True):
            tokens.append(token)
    seconds = time.perf_counter() - began
    for name in texts:
        engine.release(name)
    return load.sequences * load.steps / seconds


def prompt_of(engine: Engine, load: Load, index: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(index)
    return tuple(torch.randint(engine.vocabulary, (load.prompt,), generator=generator).tolist())


def _choose_kernels(invariant: str) -> None:
    os.environ["VLLM_BATCH_INVARIANT"] = invariant
    os.dup2(2, 1)  # vLLM logs to standard output, which must have only the JSON object


def main(
    parts: Annotated[int, typer.Option(min=1)] = 32,
    sequences: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that each sequence decodes.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, max=CONTEXT // 2, help="Tokens.")] = 128,
    model: Annotated[str | None, typer.Option(help="A model's directory; by default the embedded one.")] = None,
    on_cpu: Annotated[bool, typer.Option("--on-cpu", help="Try this program out where there is no GPU.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A small case, without a GPU too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compares rows across batches and measures decoding, with batch-invariant kernels and without."""
    if quick:
        parts, sequences, steps, prompt, on_cpu = 2, 3, 4, 16, True
    if not torch.cuda.is_available() and not on_cpu:
        print(json.dumps({"skipped": "no CUDA GPU is here"}) if as_json else "skipped: no CUDA GPU is here")
        return
    base = resolve(model)
    with tempfile.TemporaryDirectory() as folder:
        names = tuple(f"part-{index:03d}" for index in range(parts))
        load = Load(
            base, write_adapters(Path(folder), names, base, layers=usual_layers(base)), sequences, steps, prompt
        )
        report: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}
        # Batch-invariant kernels exist only on a GPU.
        for side, invariant in (SIDES if torch.cuda.is_available() else {"ordinary": "0"}).items():
            with ProcessPoolExecutor(1, get_context("spawn"), _choose_kernels, (invariant,)) as process:
                report[side] = process.submit(measure, load).result()
    rates = [report[side]["tokens_per_second"]["private"][str(parts)] for side in SIDES if side in report]
    if len(rates) == len(SIDES):
        report["invariant_over_ordinary"] = rates[0] / rates[1]
    print(json.dumps(report, indent=2)) if as_json else Console().print(report)


if __name__ == "__main__":
    typer.run(main)
