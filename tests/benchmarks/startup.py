"""Measures the seconds until a service is ready, by stage: `python -m tests.benchmarks.startup --json`.

- `service`: what `privmix serve` does with the quickstart's settings, stage after stage, in a new process: its imports,
  the steps that it prints, and a first token over HTTP. `processor` has the seconds of a processor that each process
  took until then: unlike the others, they hardly grow on a busy machine.
- `shard`: what "Loading" consists of, in a new process like that of a shard: its imports, the engine, and the first
  rows, of the public model and of one part. `within_engine` has its longest steps: the weights, compilation with the
  profile of memory, warm-up with the capture of graphs (a CPU compiles and captures nothing), the adapters,
  and the capture of steps.

The adapters are random, of the default layers and in as many files as parts.
"""

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import wraps
from multiprocessing import get_context
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, TypeVar

import typer

from privmix_cluster.options import JsonOption
from tests.benchmarks.options import show

T = TypeVar("T")

# The processes that are measured import this module first, so it imports nothing heavy.


class Stages:
    """Takes the seconds of stages that follow each other."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = []

    def __call__(self, stage: str) -> None:
        """Begins a stage, and so ends the one before it."""
        self._begun.append((stage, time.monotonic()))

    def step(self, line: str) -> None:
        """Begins a stage for a line of `launch` that names a step, such as "Loading 8 parts"; others are notes."""
        if line.split()[0].endswith("ing"):
            self(line)

    def seconds(self) -> dict[str, float]:
        """Ends the last stage; returns the seconds of each."""
        ends = [begun for _, begun in self._begun[1:]] + [time.monotonic()]
        return {stage: round(end - begun, 2) for (stage, begun), end in zip(self._begun, ends, strict=True)}


def serve(config: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Starts the service of a configuration as `privmix serve` does, asks for one token, and stops it.

    Returns:
        the seconds by stage; the seconds of a processor by process.
    """
    stages = Stages()
    stages("imports")
    import httpx

    from privmix.foundation.ray_session import connected
    from privmix_cluster.configuration import Configuration
    from privmix_cluster.launch import launch

    configuration = Configuration.load(config)
    stages("Starting Ray")
    with connected():
        service = launch(configuration, stages.step)
        try:
            stages("first token")
            request = {"model": "privmix", "prompt": "Caller: Hello", "max_tokens": 1}
            httpx.post(f"{service.url}/v1/completions", json=request, timeout=300).raise_for_status()
            return stages.seconds(), processor_seconds()
        finally:
            service.stop()


def processor_seconds() -> dict[str, float]:
    """Returns the seconds of a processor of this process, "command", and of its descendants, by actor or program."""
    import psutil

    command = psutil.Process()
    seconds = defaultdict[str, float](float)
    for process in (command, *command.children(recursive=True)):
        with suppress(psutil.Error):
            times, (title, *words) = process.cpu_times(), process.cmdline()
            programs = [Path(word).name for word in words if word.endswith(".py")] or [Path(title).name]
            name = title if title.startswith("ray::") else "command" if process == command else programs[0]
            seconds[name.removeprefix("ray::").partition("#")[0]] += times.user + times.system
    return {name: round(spent, 2) for name, spent in sorted(seconds.items(), key=lambda each: -each[1])}


WITHIN_ENGINE = {
    "load_model": "weights",
    "determine_available_memory": "compile",
    "compile_or_warm_up_model": "capture",
    "load_adapters": "adapters",
    "capture_steps": "steps",
}
"""The methods of vLLM's worker that the start of an engine calls."""


def timed(method: Callable[..., Any], seconds: dict[str, float], step: str) -> Callable[..., Any]:
    """Returns the method, which now adds its seconds to those of a step."""

    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            return method(*arguments, **options)
        finally:
            seconds[step] += time.monotonic() - began

    return call


def time_worker() -> dict[str, float]:
    """Returns what will have the seconds of `WITHIN_ENGINE` once an engine has started in this process."""
    from vllm.platforms import current_platform

    name = "cpu_reader_worker:CPUReaderWorker" if current_platform.is_cpu() else "gpu_reader_worker:GPUReaderWorker"
    worker, seconds = resolve_name(f"privmix.engine.{name}"), defaultdict[str, float](float)
    for method, step in WITHIN_ENGINE.items():
        if hasattr(worker, method):  # an engine of another commit may lack one
            setattr(worker, method, timed(getattr(worker, method), seconds, step))
    return seconds


def load(model: Path, adapters: Mapping[str, Path]) -> dict[str, Any]:
    """Loads the engine of a shard and computes the first rows. Returns the seconds by stage."""
    stages = Stages()
    stages("imports")
    from privmix.engine.engine import PUBLIC, ZERO, EngineSettings, Request
    from privmix.engine.vllm_engine import VllmEngine
    from privmix.shards import shard  # noqa: F401

    within_engine = time_worker()
    stages("engine")
    engine = VllmEngine(EngineSettings(model, context_length=1024, adapters=adapters))
    stages("first rows")
    engine.next_token([Request("first", (1, 2, 3), (PUBLIC, ZERO) if adapters else (PUBLIC,))])
    seconds = stages.seconds()
    engine.close()
    return {**seconds, "within_engine": {step: round(spent, 2) for step, spent in within_engine.items()}}


def caches(folder: Path) -> dict[str, str]:
    """Returns the variables that keep what a start compiles, and what vLLM learns of models, in this folder."""
    return {"TORCH_EXTENSIONS_DIR": str(folder / "operators"), "VLLM_CACHE_ROOT": str(folder / "vllm")}


def in_new_process(function: Callable[..., T], *arguments: Any, environment: Mapping[str, str] | None = None) -> T:
    with ProcessPoolExecutor(1, get_context("spawn"), _prepare, (environment or {},)) as process:
        return process.submit(function, *arguments).result()


def _prepare(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    os.dup2(2, 1)  # vLLM logs to standard output, which has the result alone


def main(
    parts: Annotated[int, typer.Option(min=1, help="Of the ensemble.")] = 8,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Like the first start on a machine: nothing is compiled or cached yet.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two parts.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures and prints the values of this module's description."""
    from privmix.training.public_model import resolve
    from privmix_cluster.commands.quickstart import SETTINGS
    from tests.ensembles import usual_layers, write_ensemble
    from tests.running import configure

    parts = 2 if quick else parts
    model = resolve()
    with tempfile.TemporaryDirectory(prefix="startup-") as name:
        folder = Path(name)
        ensemble = write_ensemble(folder / "ensemble", parts, layers=usual_layers(model))
        sections = {section: SETTINGS[section] for section in ("privacy", "engine", "budget")}
        service_caches, shard_caches = (caches(folder / name) if fresh else {} for name in ("service", "shard"))
        service, processor = in_new_process(serve, configure(folder, ensemble, **sections), environment=service_caches)
        adapters = {path.name: path for path in sorted((ensemble / "parts").iterdir())}
        shard = in_new_process(load, model, adapters, environment=shard_caches)
    result = {
        "parts": parts,
        "fresh": fresh,
        "service": service,
        "service_s": round(sum(service.values()), 2),
        "processor": processor,
        "processor_s": round(sum(processor.values()), 2),
        "shard": shard,
    }
    show(result, as_json)


if __name__ == "__main__":
    typer.run(main)
