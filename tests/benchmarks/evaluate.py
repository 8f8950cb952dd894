"""Measures the speed of an evaluation: `python -m tests.benchmarks.evaluate --json`.

Evaluates held-out tokens under every part of an ensemble with PMixed's three mollifiers; every part is drawn. Ours: a
forward pass per block and adapter, stored hidden states, then one pass over them for all methods. The baseline, in the
same run and on some of the rows: a forward pass of the same block and adapter by transformers in float32, and for each
method a SciPy bisection per row. Both count the processor time of one thread, which other load hardly affects.

- `token_parts_per_s`: tokens times parts per second of ours with all three methods, including forward passes.
- `ratio`: its ratio to the baseline that evaluates each method separately: a forward pass per adapter, and a bisection
  per row. `ratio_shared` is the ratio if the baseline shared its forward passes, too.
- `token_parts_per_s_stored`, `ratio_stored`: the same for one more method from stored hidden states, as in a sweep.
- `ms_per_row`: the time by stage, of both.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from privmix.engine.engine import AdapterFiles
from privmix.laboratory.evaluation.rows import EnsembleRows, RowReader
from privmix.laboratory.evaluation.scoring import Scorer
from privmix.laboratory.evaluation.tasks import score, score_public
from privmix.laboratory.evaluation.text import Block, EvaluationText
from privmix.laboratory.evaluation.trial import run_trials
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings
from privmix.privacy.settings import Settings
from privmix.training.public_model import resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks.mollify import LOSS, ORDER, RADIUS, clip_by_scipy, mix_by_scipy, renyi_by_scipy
from tests.benchmarks.options import show
from tests.ensembles import write_adapters
from tests.services.conftest import TEXT

CONTEXT = 256
UNLIMITED = PMixedSettings(epsilon=None, radius=RADIUS)
BY_SCIPY = {"clip": clip_by_scipy, "mix": mix_by_scipy, "renyi": renyi_by_scipy}


def held_out(model: Path, blocks: int) -> EvaluationText:
    """Returns blocks of one text, each one token later than the one before."""
    tokens = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"] * 4
    made = tuple(Block(tuple(tokens[start : start + CONTEXT]), tuple(range(1, CONTEXT))) for start in range(blocks))
    return EvaluationText(made, (np.arange(blocks * (CONTEXT - 1)),))


def methods(parts: int) -> Mapping[str, tuple[Settings, Protocol]]:
    return {
        "clip": (UNLIMITED, PMixed(parts, 1.0, RADIUS)),
        "mix": (UNLIMITED, PMixed(parts, 1.0, RADIUS, projection="mix")),
        "renyi": (UNLIMITED, PMixed(parts, 1.0, mollifier="renyi", order=ORDER, loss=LOSS)),
    }


def seconds(work: Callable[[], Any], repeats: int = 1) -> float:
    """Returns the minimum processor time of several repetitions."""
    taken = []
    for _ in range(repeats):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return min(taken)


def ours(
    folder: Path, model: Path, adapters: Mapping[str, Path], text: EvaluationText
) -> tuple[dict[str, float], RowReader]:
    """Measures ours: milliseconds per row by stage."""
    models = tuple(folder / f"{name}.npy" for name in adapters)
    files = EnsembleRows(folder / "head.safetensors", folder / "public.npy", models)
    Scorer(model)  # loading is no part of it: once a worker, however much text there is
    score_public(model, text, "auto", files.head, files.public)
    targets = [(AdapterFiles(path, "reader"), file) for path, file in zip(adapters.values(), files.models, strict=True)]
    forward = seconds(lambda: score(model, targets, text, "auto"))
    reader, planned = RowReader.open(files), methods(len(adapters))
    rows = text.positions * len(adapters)

    def evaluate(*names: str) -> float:
        chosen = [planned[name] for name in names]
        return 1e3 * seconds(lambda: run_trials(chosen, reader, text.runs[0], text.true_tokens), 2) / rows

    return {
        "forward": 1e3 * forward / rows,
        "all methods": evaluate(*planned),
        "one method": evaluate("clip"),
    }, reader


def replaced(
    model: Path, adapters: Mapping[str, Path], text: EvaluationText, reader: RowReader, sample: int
) -> dict[str, float]:
    """Measures the baseline: a forward pass per adapter, and a bisection for each of ``sample`` rows."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(base, next(iter(adapters.values())))
    inputs = torch.tensor([text.blocks[0].tokens])

    @torch.inference_mode()
    def forward() -> None:
        adapted(input_ids=inputs).logits.softmax(-1)

    public, parts = reader(text.runs[0][:: max(1, text.positions // sample)][:sample])
    p0 = public.double().exp().numpy()
    rows = parts.view(len(public), len(adapters), -1)[:, 0].double().exp().numpy()
    milliseconds = {"forward": 1e3 * seconds(forward, 3) / (CONTEXT - 1)}
    for name, by_scipy in BY_SCIPY.items():
        spent = seconds(lambda: [by_scipy(*pair) for pair in zip(p0, rows, strict=True)], 2)  # noqa: B023
        milliseconds[name] = 1e3 * spent / len(rows)
    return milliseconds


def evaluate(
    as_json: JsonOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="One block and two parts.")] = False,
    parts: Annotated[int, typer.Option(min=2, help="Parts of the ensemble.")] = 8,
    blocks: Annotated[int, typer.Option(min=1, help=f"Blocks of {CONTEXT} tokens.")] = 4,
    sample: Annotated[int, typer.Option(min=1, help="Rows that SciPy bisects.")] = 12,
) -> None:
    """Measures an evaluation and its baseline."""
    torch.set_num_threads(1)
    parts, blocks, sample = (2, 1, 1) if quick else (parts, blocks, sample)
    model = resolve()
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(Path(folder), [f"part-{index}" for index in range(parts)], model)
        text = held_out(model, blocks)
        own, reader = ours(Path(folder), model, adapters, text)
        slow = replaced(model, adapters, text, reader, sample)
    first, again = own["forward"] + own["all methods"], own["one method"]
    numbers = {
        "token_parts_per_s": 1e3 / first,
        "ratio": (sum(slow.values()) + (len(BY_SCIPY) - 1) * slow["forward"]) / first,
        "ratio_shared": sum(slow.values()) / first,
        "token_parts_per_s_stored": 1e3 / again,
        "ratio_stored": (slow["forward"] + slow["clip"]) / again,
    }
    setting = {"parts": parts, "tokens": text.positions, "threads": 1}
    show({**setting, **numbers, "ms_per_row": {"ours": own, "replaced": slow}}, as_json)


if __name__ == "__main__":
    typer.run(evaluate)
