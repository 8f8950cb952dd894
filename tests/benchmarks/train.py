"""Measures the training of many small parts: `python -m tests.benchmarks.train --json`.

Trains the same corpus twice with the code of `privmix train`, on one Ray with one core: in few parts and in many.
Before that, it starts Ray and trains one part, so that neither side includes the first load of the public model.

- `ratio`: seconds for many parts over seconds for few. Both train on the same tokens.
- `seconds`, `adapters_per_s`: the values of both sides.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import ray
import typer

from services.files import write_lines
from services.training import demo
from services.training.corpus import Corpus
from services.training.options import TrainingOptions
from services.training.train import train

# A step has about 500 tokens, like the default on one core, so that small parts have some steps.
OPTIONS = TrainingOptions(block=128, batch=4, epochs=1)


def write_corpus(path: Path, users: int) -> Corpus:
    """Writes dialogues of the demo corpus, of ``users`` users."""
    demo.write_demo_corpus(path.parent / "demo", users=users, held_out=0)
    write_lines(
        path, [{"user": document.user, "text": document.text} for document in Corpus(path.parent / "demo" / demo.TRAIN)]
    )
    return Corpus(path)


def seconds(corpus: Corpus, output: Path, parts: int) -> float:
    begun = time.monotonic()
    trained = train(Corpus(corpus.path), output, parts=parts, options=OPTIONS)
    assert trained.trained == parts
    return time.monotonic() - begun


def benchmark(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="4 and 32 parts of a small corpus.")] = False,
    few: Annotated[int, typer.Option(min=1)] = 16,
    many: Annotated[int, typer.Option(min=2)] = 256,
    users: Annotated[int, typer.Option(min=1, help="Of the corpus; some 120 tokens each.")] = 512,
) -> None:
    """Time the training of few and of many parts of one corpus."""
    if quick:
        few, many, users = 4, 32, 64
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            corpus = write_corpus(Path(folder) / "corpus.jsonl", users)
            seconds(write_corpus(Path(folder) / "warm.jsonl", 2), Path(folder) / "warm", 1)
            taken = {parts: seconds(corpus, Path(folder) / str(parts), parts) for parts in (few, many)}
    finally:
        ray.shutdown()
    numbers = {
        "ratio": taken[many] / taken[few],
        "seconds": taken,
        "adapters_per_s": {parts: parts / time for parts, time in taken.items()},
        "users": users,
    }
    if as_json:
        print(json.dumps(numbers, indent=2))
    else:
        print(
            f"{many} parts take {numbers['ratio']:.2f} times as long as {few} ({taken[many]:.0f} s, {taken[few]:.0f} s)"
        )


if __name__ == "__main__":
    typer.run(benchmark)
