"""Checks and measures the engine on a GPU: `python -m tests.benchmarks.gpu --json`. Ends with a message without one.

- `agreement`: how far rows of vLLM are from those of transformers in float32: for readers of a dense model, with logits
  in the model's type and in float32 (`head_dtype`), for a mixture of experts and for texts as parts. `largest` and
  `mean` are of |difference of log p| in the 20 likeliest tokens of each row, `variation` is the mean total variation,
  and `ratio` the mean |difference of log p/p0| of a part in the 20 likeliest tokens of the public row.
- `rows_that_differ`: the number of rows whose bits differ between a request alone and requests beside other sequences,
  in batches of growing size, three times over; 0 with batch-invariant kernels
  (`engine.batch_invariant`).
- `tokens_per_second`: decoding speed of all sequences: `plain` with one row of the public model per token; `private`
  with rows of 1, 16 and all parts besides, by their number.
- `private_over_plain`: the ratios of these speeds.
- `stages_ms`: for the same numbers of parts, a step by stage: the public pass (where vLLM runs eagerly, the readers are
  in it), the readers, the head, the reduction of the rows, and the rest. The device is idle between two stages, so
  their sum is more than a step.
- `copy_ms`: to bring p0 of all sequences to the host: into new pages, and as a shard does (`reduction.on_host`).
- `invariant_over_ordinary`: the ratio of the speeds with batch-invariant kernels and with vLLM's ordinary ones, for
  rows of all parts.
- `restart`: seconds to load the engine again in a new process (`tests.benchmarks.startup`), where vLLM finds what it
  compiled; `recovery_s` is how long a sequence waits for a shard by default.

vLLM reads the choice of kernels when it is imported, and an engine keeps its memory until its process ends, so each
engine runs in a process of its own, one after the other.
"""

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

from cluster.options import JsonOption
from services.coordinator.settings import StepSettings
from services.engine.engine import PUBLIC, Engine, EngineSettings, Request, create
from services.engine.part_text import text_files
from services.files import write_files
from services.privacy.protocols.pmixed import PMixed
from services.reduction import Reducer, on_host
from services.training.public_model import resolve
from tests.benchmarks.reduction import RADIUS, reduction
from tests.benchmarks.startup import in_new_process, load, timed
from tests.ensembles import usual_layers, write_adapters
from tests.tiny import write_mixture_of_experts

CONTEXT = 512
BATCHES = (1, 3, 8, 17, 40)
"""Even batch-invariant kernels give other bits above some 44 sequences (vLLM #51187)."""
REPEATS = 3
SIDES = {"invariant": "1", "ordinary": "0"}
PUBLIC_TEXT = Path(__file__).parents[2] / "services" / "privacy" / "README.md"
LIKELIEST = 20
PART_TEXT = 128
COPIES = 10


@dataclass(frozen=True)
class Load:
    model: Path
    adapters: Mapping[str, Path]
    sequences: int
    steps: int
    prompt: int


def agreements(base: Path, adapters: Mapping[str, Path], contexts: int, folder: Path) -> dict[str, dict[str, float]]:
    """Compares rows of the public model and of up to three parts, after 16 to 248 tokens of public text."""
    tokens = AutoTokenizer.from_pretrained(base)(PUBLIC_TEXT.read_text()).input_ids
    few = dict(list(adapters.items())[:3])
    dense = EngineSettings(base, context_length=CONTEXT, adapters=few)
    texts = replace(dense, adapters=_text_parts(folder / "texts", tokens[-3 * PART_TEXT :]), part_kind="text")
    compared = {
        "dense, head in the model's type": replace(dense, head_dtype="model"),
        "dense, head in float32": replace(dense, head_dtype="float32"),
        "experts": _experts(folder),
        "texts": texts,
    }
    expected: dict[Path, NDArray[np.float32]] = {}
    agreement = {}
    for name, settings in compared.items():
        vocabulary = 128 if name == "experts" else max(tokens) + 1
        requests = [
            Request(f"{start}-{length}", tuple(token % vocabulary for token in tokens[start:][:length]), names)
            for names in [(PUBLIC, *settings.adapters)]
            for start in range(0, 256 * contexts, 256)
            for length in range(16, 256, 8)
        ][:contexts]
        files = next(iter(settings.adapters.values()))
        if files not in expected:
            reference = replace(settings, kind="transformers", dtype="float32", head_dtype="auto")
            expected[files] = in_new_process(rows_of, reference, requests)
        agreement[name] = differences(in_new_process(rows_of, settings, requests), expected[files])
    return agreement


def rows_of(settings: EngineSettings, requests: Sequence[Request]) -> NDArray[np.float32]:
    """Returns the rows of a new engine, [requests, models, V]."""
    engine = create(settings)
    rows = engine.next_token(requests).cpu().numpy()
    engine.close()
    return rows.reshape(len(requests), -1, rows.shape[1])


def differences(rows: NDArray[np.float32], expected: NDArray[np.float32]) -> dict[str, float]:
    """Compares log-probabilities [requests, models, V], of which the first model is the public one."""
    ours, theirs = torch.from_numpy(rows), torch.from_numpy(expected)
    likely = theirs.topk(LIKELIEST).indices
    logs = (ours - theirs).abs().gather(-1, likely)
    ratios = (ours[:, 1:] - ours[:, :1]) - (theirs[:, 1:] - theirs[:, :1])
    values = {
        "largest": logs.max(),
        "mean": logs.mean(),
        "variation": (ours.exp() - theirs.exp()).abs().sum(-1).mean() / 2,
        "ratio": ratios.abs().gather(-1, likely[:, :1].expand(-1, ratios.shape[1], -1)).mean(),
    }
    return {name: float(f"{float(value):.3g}") for name, value in values.items()}


def _text_parts(folder: Path, tokens: Sequence[int]) -> dict[str, Path]:
    paths = {f"text-{start}": folder / f"text-{start}" for start in range(0, len(tokens), PART_TEXT)}
    for start, path in zip(range(0, len(tokens), PART_TEXT), paths.values(), strict=True):
        write_files(path, text_files(np.array(tokens[start:][:PART_TEXT], np.int32), PART_TEXT))
    return paths


def _experts(folder: Path) -> EngineSettings:
    """Returns a mixture of experts with readers; on a CPU, where vLLM runs none, with texts and in float32."""
    model = write_mixture_of_experts(folder / "experts")
    if torch.cuda.is_available():
        parts = write_adapters(folder / "experts-parts", ("first", "second"), model, targets=("q_proj", "o_proj"))
        return EngineSettings(model, context_length=256, adapters=parts)
    parts = _text_parts(folder / "experts-parts", [7 * token % 128 for token in range(2 * PART_TEXT)])
    return EngineSettings(model, dtype="float32", context_length=256, part_kind="text", adapters=parts)


def measure(load: Load) -> dict[str, Any]:
    """Measures one side. The environment of the process chooses the kernels."""
    engine = create(EngineSettings(model=load.model, adapters=load.adapters, context_length=CONTEXT))
    try:
        compared, different = compare_batches(engine, load)
        plain, names = tokens_per_second(engine, load, ()), tuple(load.adapters)
        numbers = sorted({1, min(16, len(names)), len(names)})
        private = {str(number): tokens_per_second(engine, load, names[:number]) for number in numbers}
        seconds = time_stages(engine)
        stages = {str(number): stages_ms(engine, load, names[:number], seconds) for number in numbers}
    finally:
        engine.close()
    return {
        "rows_compared": compared,
        "rows_that_differ": different,
        "tokens_per_second": {"plain": plain, "private": private},
        "private_over_plain": {number: speed / plain for number, speed in private.items()},
        "stages_ms": stages,
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
    return load.sequences / decode(engine, load, adapters)


def decode(
    engine: Engine, load: Load, adapters: tuple[str, ...], use: Callable[[torch.Tensor, int], Any] | None = None
) -> float:
    """Decodes all sequences together, greedily by the public row. Returns the seconds of a step after the prefill.

    Args:
        use: is called with the rows and the number of each step, 0 for the prefill.
    """
    texts = {f"text-{index}": list(prompt_of(engine, load, index)) for index in range(load.sequences)}
    rows_each = 1 + len(adapters)
    began = 0.0
    for step in range(load.steps + 1):
        if step == 1:
            began = time.perf_counter()
        requests = [Request(name, tuple(tokens), (PUBLIC, *adapters)) for name, tokens in texts.items()]
        rows = engine.next_token(requests)
        if use is not None:
            use(rows, step)
        following = rows[::rows_each].argmax(dim=-1).tolist()
        for tokens, token in zip(texts.values(), following, strict=True):
            tokens.append(token)
    seconds = time.perf_counter() - began
    for name in texts:
        engine.release(name)
    return seconds / load.steps


def time_stages(engine: Any) -> dict[str, float]:
    """Returns what has the seconds of the coming passes of vLLM's model runner by stage."""
    seconds: dict[str, float] = defaultdict(float)

    def install(worker: Any) -> None:
        runner = worker.model_runner
        for stage, owner, method in (
            ("passes", runner, "_model_forward"),
            ("readers", runner, "_run_readers"),
            ("head", runner.get_model(), "compute_logits"),
        ):
            setattr(owner, method, on_an_idle_device(getattr(owner, method), seconds, stage))

    engine._worker(install)
    return seconds


def on_an_idle_device(method: Callable[..., Any], seconds: dict[str, float], stage: str) -> Callable[..., Any]:
    """Returns the method, which now waits for the device before and after, and adds its seconds."""

    def complete(*arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        _wait()
        return result

    measured = timed(complete, seconds, stage)

    def call(*arguments: Any, **options: Any) -> Any:
        _wait()
        return measured(*arguments, **options)

    return call


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def stages_ms(engine: Engine, load: Load, adapters: tuple[str, ...], seconds: dict[str, float]) -> dict[str, float]:
    reducer = Reducer()
    given = reduction(PMixed(len(adapters), 1.0, RADIUS), load.sequences, len(adapters))
    reduce = on_an_idle_device(reducer.reduce, seconds, "reduction")

    def use(rows: torch.Tensor, step: int) -> None:
        if step == 0:
            seconds.clear()
        else:
            reduce(rows, given)

    total = load.steps * decode(engine, load, adapters, use)
    stages = {
        "public": seconds["passes"] - seconds["readers"],
        "readers": seconds["readers"],
        "head": seconds["head"],
        "reduction": seconds["reduction"],
        "other": total - seconds["passes"] - seconds["head"] - seconds["reduction"],
    }
    return {stage: round(1000 * spent / load.steps, 2) for stage, spent in stages.items()}


def copy_ms(sequences: int, vocabulary: int) -> dict[str, float]:
    rows = torch.rand(sequences, vocabulary, device="cuda" if torch.cuda.is_available() else "cpu")
    copies: dict[str, Callable[[], Any]] = {"new pages": lambda: rows.cpu().numpy(), "shard": lambda: on_host(rows)}
    seconds: dict[str, float] = defaultdict(float)
    for name, copy in copies.items():
        copy()
        for _ in range(COPIES):
            on_an_idle_device(copy, seconds, name)()
    return {name: round(1000 * spent / COPIES, 2) for name, spent in seconds.items()}


def prompt_of(engine: Engine, load: Load, index: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(index)
    return tuple(torch.randint(engine.vocabulary, (load.prompt,), generator=generator).tolist())


def main(
    parts: Annotated[int, typer.Option(min=1)] = 32,
    sequences: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that each sequence decodes.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, max=CONTEXT // 2, help="Tokens.")] = 128,
    contexts: Annotated[int, typer.Option(min=1, help="Contexts in which engines are compared.")] = 120,
    model: Annotated[str | None, typer.Option(help="A model's directory; by default the embedded one.")] = None,
    on_cpu: Annotated[bool, typer.Option("--on-cpu", help="Try this program out where there is no GPU.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A small case, without a GPU too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compares engines and batches, and measures decoding, with batch-invariant kernels and without."""
    if quick:
        parts, sequences, steps, prompt, contexts, on_cpu = 2, 3, 4, 16, 4, True
    if not torch.cuda.is_available() and not on_cpu:
        print(json.dumps({"skipped": "no CUDA GPU is here"}) if as_json else "skipped: no CUDA GPU is here")
        return
    base = resolve(model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = tuple(f"part-{index:03d}" for index in range(parts))
        adapters = write_adapters(folder / "adapters", names, base, layers=usual_layers(base))
        report: dict[str, Any] = {}

        def measured(stage: str, value: Any) -> None:
            """Shows each stage at once: on a GPU every engine compiles, for minutes, and the program may be stopped."""
            report[stage] = value
            print(f"{stage}: {json.dumps(value)}", file=sys.stderr, flush=True)

        measured("device", torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
        vocabulary = AutoConfig.from_pretrained(base).vocab_size
        measured("copy_ms", in_new_process(copy_ms, sequences, vocabulary))
        measured("agreement", agreements(base, adapters, contexts, folder))
        # Batch-invariant kernels exist only on a GPU.
        for side, invariant in (SIDES if torch.cuda.is_available() else {"ordinary": "0"}).items():
            given = Load(base, adapters, sequences, steps, prompt)
            measured(side, in_new_process(measure, given, environment={"VLLM_BATCH_INVARIANT": invariant}))
        measured("restart", in_new_process(load, base, adapters))
    report["recovery_s"] = StepSettings().recovery_s
    rates = [report[side]["tokens_per_second"]["private"][str(parts)] for side in SIDES if side in report]
    if len(rates) == len(SIDES):
        report["invariant_over_ordinary"] = rates[0] / rates[1]
    print(json.dumps(report, indent=2)) if as_json else Console().print(report)


if __name__ == "__main__":
    typer.run(main)
