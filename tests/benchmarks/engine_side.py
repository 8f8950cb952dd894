"""Decodes with the engine of one checkout when `tests.benchmarks.sides` asks for it, which runs this file by its path.

PYTHONPATH names the checkout's packages, so nothing but `privmix` may be imported here: the other checkout's `tests`
may lack anything. Reads a line of JSON for each measurement from the standard input, and answers with one.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from privmix.engine.engine import PUBLIC, EngineSettings, Request, create
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.pmixed import PMixed
from privmix.shards.reducer import Reducer, Reduction

WITHIN_MODEL = ("_model_forward", "compute_logits")
RADIUS = 1.6


class EngineSide:
    """Decodes sequences greedily by the public row, and knows how long the model itself takes.

    Args:
        adapters: the directories of the parts. Each step draws from them for each sequence.
    """

    def __init__(self, model: Path, adapters: Mapping[str, Path], context_length: int, cache_gib: float) -> None:
        self._engine: Any = create(
            EngineSettings(model, context_length=context_length, cache_gib=cache_gib, adapters=adapters)
        )
        self._reducer: Any = Reducer()
        self._parts = sorted(adapters)
        self._texts: dict[tuple[int, int], dict[str, list[int]]] = {}
        self._draw = random.Random(0)
        self._model_s = 0.0
        runner = self._runner()
        for owner, name in zip((runner, runner.model), WITHIN_MODEL, strict=True):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _runner(self) -> Any:
        runners: list[Any] = []
        self._engine._worker(lambda worker: runners.append(worker.model_runner))
        return runners[0]

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self._model_s += time.thread_time() - began

        return call

    def step(self, sequences: int, context: int, readers: int) -> tuple[float, float, float, float]:
        """Appends a token to each sequence.

        Returns:
            the seconds of the rows; the thread's own seconds outside the model; the seconds from rows to weights, by
            PMixed for one part and by the exponential mechanism for several, 0 where the engine does not weigh; the
            processor's seconds of rows and weights together, of all threads.
        """
        key = context, readers
        if key not in self._texts:
            generator = torch.Generator().manual_seed(context)
            self._texts[key] = {
                f"{context}-{readers}-{index}": torch.randint(
                    self._engine.vocabulary, (context,), generator=generator
                ).tolist()
                for index in range(sequences)
            }
        texts = self._texts[key]
        requests = [
            Request(name, tuple(tokens), (PUBLIC, *sorted(self._draw.sample(self._parts, readers))))
            for name, tokens in texts.items()
        ]
        self._model_s = 0.0
        processor_began = time.process_time()
        began, thread_began = time.perf_counter(), time.thread_time()
        rows = self._engine.logits(requests)
        seconds, thread_s = time.perf_counter() - began, time.thread_time() - thread_began
        weighed_s = self._weigh(rows, sequences, readers)
        processor_s = time.process_time() - processor_began
        for tokens, token in zip(texts.values(), rows[:: 1 + readers].argmax(dim=-1).tolist(), strict=True):
            tokens.append(token)
        return seconds, thread_s - self._model_s, weighed_s, processor_s

    def _weigh(self, rows: torch.Tensor, sequences: int, readers: int) -> float:
        if not hasattr(self._reducer, "weigh"):
            return 0.0
        count = max(readers, 1)
        protocol: Protocol = PMixed(64, 1.0, RADIUS) if count == 1 else Exponential(count, count, RADIUS)
        drawn = np.ones((sequences if readers else 0, count), dtype=np.bool_)
        given = Reduction(protocol, (SamplingOptions(),) * sequences, drawn)
        began = time.perf_counter()
        self._reducer.weigh(rows, given)
        return time.perf_counter() - began

    def end(self, context: int, readers: int) -> None:
        for name in self._texts.pop((context, readers)):
            self._engine.drop_caches(name)


def main(given: Mapping[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to the standard output
    adapters = {path.name: path for path in sorted(Path(given["adapters"]).iterdir())}
    side = EngineSide(Path(given["model"]), adapters, given["context_length"], given["cache_gib"])
    for line in chain(["{}"], sys.stdin):  # the first answer says that the engine is ready
        asked = json.loads(line)
        measured: Sequence[tuple[float, ...]] = []
        if "steps" in asked:
            measured = [side.step(*asked["cell"]) for _ in range(asked["steps"])]
        elif "end" in asked:
            side.end(*asked["end"])
        print(json.dumps(measured), file=answers, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
