"""Measures one cell of `tests.benchmarks.gpu` in this process: `python -m tests.benchmarks.gpu_stages CELL RESULT`.

CELL is a JSON file with the function's name and its arguments. RESULT receives what was measured after every step, so
that a process that fails or is stopped leaves what it had.
"""

import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privmix.engine.engine import PUBLIC, Engine, EngineSettings, Request, create
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.sampling.categorical import draw
from privmix.shards.reducer import Reducer, Reduction, pick
from tests.benchmarks.shapes import SHAPES

Found = Iterator[dict[str, Any]]

SPARE = 512
"""The tokens for which an engine's contexts have room beyond the first ones."""
BATCHES = (1, 3, 8, 17, 40)
"""Even batch-invariant kernels give other bits above some 44 sequences (vLLM #51187)."""
REPEATS = 3
ALONE = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has asked for GPUs already
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it decodes greedily, and a bare machine has no FlashInfer
}
"""The environment of vLLM alone."""
ON_GPU = torch.cuda.is_available()
WARM_UPS = 4
ROUNDS = 3
RADIUS = 1.6

Use = Callable[[Tensor], Sequence[int] | None]
"""Gets a step's logits, and may return the token of each sequence."""


class Decoding:
    """Decodes sequences together. They start with random contexts, all of them different.

    Args:
        parts: each step draws from them for each sequence.
    """

    def __init__(self, engine: Engine, sequences: int, context: int, parts: Sequence[str]) -> None:
        generator = torch.Generator().manual_seed(context)
        self.sequences = sequences
        self._engine = engine
        self._parts = sorted(parts)
        self._draw = random.Random(0)
        self._texts = {
            f"{context}-{index}": torch.randint(engine.vocabulary, (context,), generator=generator).tolist()
            for index in range(sequences)
        }

    def step(self, readers: int, use: Use | None = None) -> float:
        """Appends a token to each sequence. Returns the seconds from the requests to the tokens.

        Args:
            readers: the number of parts that are drawn for each sequence.
            use: is called with the logits, [S (1 + readers), V]. Tokens are the public row's likeliest by default.
        """
        requests = [
            Request(name, tuple(tokens), (PUBLIC, *sorted(self._draw.sample(self._parts, readers))))
            for name, tokens in self._texts.items()
        ]
        began = time.perf_counter()
        logits = self._engine.logits(requests)
        following = logits[:: 1 + readers].argmax(dim=-1)
        used = None if use is None else use(logits)
        chosen = following.tolist() if used is None else used
        seconds = time.perf_counter() - began
        for tokens, token in zip(self._texts.values(), chosen, strict=True):
            tokens.append(token)
        return seconds

    def end(self) -> None:
        for name in self._texts:
            self._engine.drop_caches(name)


def sampling(sequences: int, readers: int) -> Use:
    """Returns what samples a token of each sequence as a shard with all parts does.

    It does so by the exponential mechanism, and without readers from p0.
    """
    private, count = sequences if readers else 0, max(readers, 1)
    drawn = np.ones((private, count), dtype=np.bool_)
    given = Reduction(Exponential(count, count, RADIUS), (SamplingOptions(),) * sequences, drawn)
    reducer = Reducer()

    def use(logits: Tensor) -> list[int]:
        begun = reducer.begin(logits, given)
        cumulative = reducer.weights(begun)
        totals, _ = begun.leaving(cumulative[:, -1].contiguous())
        tokens: list[int] = pick(np.array(draw(totals.tolist())), cumulative).tolist()
        return tokens

    return use


def step_ms(decoding: Decoding, numbers: Sequence[int], steps: int) -> dict[str, dict[str, float]]:
    """Returns the median milliseconds of a step by the number of readers: of its rows alone, and with sampled tokens.

    The sides take turns, so that they share whatever changes over time. The number 0 stands for public rows alone.
    """
    sides: dict[tuple[int, str], tuple[int, Use | None]] = {}
    for readers in (0, *numbers):
        sides[readers, "rows"] = readers, None
        sides[readers, "sampled"] = readers, sampling(decoding.sequences, readers)
    for side in sides.values():
        for _ in range(WARM_UPS):
            decoding.step(*side)
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for key, side in sides.items():
            decoding.step(*side)
            seconds[key] += [decoding.step(*side) for _ in range(max(1, steps // ROUNDS))]
    measured: dict[str, dict[str, float]] = defaultdict(dict)
    for (readers, kind), each in seconds.items():
        measured[str(readers)][kind] = round(1000 * statistics.median(each), 3)
    return dict(measured)


@dataclass(frozen=True)
class EngineCase:
    """Describes an engine and its load.

    Attributes:
        shape: the model's name in `SHAPES`.
        model, adapters: their directories. A model without weights gets random ones.
        readers: the number of parts that are drawn for each sequence.
    """

    shape: str
    model: Path
    adapters: Mapping[str, Path]
    sequences: int
    context: int
    readers: int
    steps: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "EngineCase":
        adapters = {path.name: path for path in sorted(Path(values["adapters"]).iterdir())}
        return cls(**{**values, "model": Path(values["model"]), "adapters": adapters})

    @property
    def settings(self) -> EngineSettings:
        dummy = not list(self.model.glob("*.safetensors"))
        return EngineSettings(
            self.model,
            context_length=self.context + SPARE,
            adapters=self.adapters,
            rows=self.readers,
            load_format="dummy" if dummy else "auto",
        )

    def decoding(self, engine: Engine, context: int | None = None) -> Decoding:
        return Decoding(engine, self.sequences, context or self.context, tuple(self.adapters))


def speed(case: Mapping[str, Any], numbers: Sequence[int], contexts: Sequence[int]) -> Found:
    """Measures an engine: its start, and milliseconds of a step by the number of readers and context."""
    given = EngineCase.of(case)
    began = time.perf_counter()
    engine: Any = create(given.settings)
    yield {"start_s": round(time.perf_counter() - began, 1)}
    if hasattr(engine, "capture"):
        engine.capture(numbers)
    for context in contexts:
        decoding = given.decoding(engine, context)
        yield {f"ms,{context}": step_ms(decoding, numbers, given.steps)}
        decoding.end()
    engine.close()


def plain_vllm(case: Mapping[str, Any]) -> Found:
    """Measures the milliseconds of a step of vLLM alone, decoding greedily with its own scheduling and sampler.

    The time of a long generation minus that of a short one is divided by the difference of their tokens.
    """
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    given = EngineCase.of(case)
    capture = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": sorted({1, 2, 4, 8, 16, 32, given.sequences}),
    }
    began = time.perf_counter()
    model = LLM(
        str(given.model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=given.context + SPARE,
        max_num_seqs=max(given.sequences, 64),
        load_format=given.settings.load_format,
        disable_log_stats=True,
        gpu_memory_utilization=0.9 if ON_GPU else 0.1,
        compilation_config=capture,
    )
    yield {"start_s": round(time.perf_counter() - began, 1)}
    generator = torch.Generator().manual_seed(given.context)
    vocabulary = SHAPES[given.shape].vocabulary
    prompts = [
        {"prompt_token_ids": torch.randint(vocabulary, (given.context,), generator=generator).tolist()}
        for _ in range(given.sequences)
    ]

    def seconds(tokens: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        model.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began

    short, long = 4, 4 + 2 * given.steps
    seconds(short)  # ingests the prompts, which the others find in the cache
    differences = [seconds(long) - seconds(short) for _ in range(3)]
    yield {"ms": round(1000 * sorted(differences)[1] / (long - short), 3)}


def replays(case: Mapping[str, Any]) -> Found:
    """Compares each captured step with the same code run eagerly on the same inputs, bit for bit."""
    graphs_on_a_cpu()
    given = EngineCase.of(case)
    engine: Any = create(given.settings)
    for sequences in sorted({given.sequences, min(5, given.sequences), 1}):
        decoding = replace(given, sequences=sequences).decoding(engine)
        decoding.step(given.readers)
        for readers in (given.readers, 0):
            compared: list[dict[str, Any]] = []
            for _ in range(given.steps):
                decoding.step(readers, lambda logits: compared.append(against_eager(engine, logits, readers)))  # noqa: B023
            missing = [each for each in compared if "rows" not in each]
            yield {
                f"{sequences},{readers}": {"steps": len(compared), "not_captured": len(missing)}
                if missing
                else {
                    "steps": len(compared),
                    "rows": sum(each["rows"] for each in compared),
                    "rows_that_differ": sum(each["differ"] for each in compared),
                    "largest": max(each["largest"] for each in compared),
                }
            }
        decoding.end()
    engine.close()


def graphs_on_a_cpu() -> None:
    """Lets the engines of a CPU replay a stand-in for graphs, which tries out what a GPU is to run."""
    if not ON_GPU:
        import pytest

        from tests.services.engine.fake_graph import capture_on_a_cpu

        capture_on_a_cpu(pytest.MonkeyPatch())


def against_eager(engine: Any, logits: Tensor, readers: int) -> dict[str, Any]:
    """Compares the logits of the step that a graph has just replayed with those of its function on the same buffers."""
    graphs = engine._core.collective_rpc(lambda worker: getattr(worker.model_runner, "_graphs", None))[0]
    shape = graphs and graphs.shape_for(len(logits) // (1 + readers), readers)
    if not shape:
        return {}
    replayed = logits.clone()
    with torch.inference_mode():
        eager = graphs.run(shape)[: len(replayed)]
    return {
        "rows": len(replayed),
        "differ": int((replayed != eager).any(dim=-1).sum()),
        "largest": float((replayed - eager).abs().max()),
    }


def batches(case: Mapping[str, Any]) -> Found:
    """Compares rows of a request alone with those beside other sequences, in batches of growing size."""
    if not ON_GPU and os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        yield {"skipped": "vLLM has batch-invariant kernels for GPUs alone"}
        return
    given = EngineCase.of(case)
    engine: Any = create(given.settings)
    names = (PUBLIC, *list(given.adapters)[: given.readers])
    generator = torch.Generator().manual_seed(0)
    prompts = [
        tuple(torch.randint(engine.vocabulary, (given.context,), generator=generator).tolist())
        for _ in range(max(BATCHES))
    ]
    alone = engine.next_token([Request("alone", prompts[0], names)]).clone()
    engine.drop_caches("alone")
    compared = different = 0
    for size in (size for size in BATCHES if size <= given.sequences):
        for _ in range(REPEATS):
            asked = [Request(f"beside-{index}", prompts[index], names) for index in range(size)]
            rows = engine.next_token(asked)[: len(names)]
            compared += len(names)
            different += int((rows != alone).any(dim=-1).sum())
            for request in asked:
                engine.drop_caches(request.sequence)
    yield {"rows_compared": compared, "rows_that_differ": different}
    engine.close()


CELLS: Mapping[str, Callable[..., Found]] = {cell.__name__: cell for cell in (speed, plain_vllm, replays, batches)}


def main(cell: Path, result: Path) -> None:
    given = json.loads(cell.read_text())
    found: dict[str, Any] = {}
    for part in CELLS[given["function"]](**given["arguments"]):
        found |= part
        result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
