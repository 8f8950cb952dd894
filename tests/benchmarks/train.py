"""Measures the training of many small parts, and of DP-SGD: `python -m tests.benchmarks.train --json`.

Trains the same corpus twice with the code of `privmix train`, on one Ray with one core: in few parts and in many.
Before that, it starts Ray and trains one part, so that neither side includes the first load of the public model.

- `ratio`: seconds for many parts over seconds for few. Both train on the same tokens.
- `seconds`, `adapters_per_s`: the values of both sides.
- `dp_sgd`: users a second whose clipped gradients are summed, by the code of `privmix train --dp-sgd` and by Opacus'
  hooks, in alternating passes over the same users, model and adapter on one core; by the number of tokens of a user.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import ray
import torch
import typer
from torch.nn.functional import cross_entropy

from cluster.options import JsonOption
from services.files import write_lines
from services.training import demo
from services.training.adapter import TOKENS_AT_ONCE, with_lora
from services.training.corpus import Corpus
from services.training.options import DP_SGD_TRAINING, TrainingOptions
from services.training.packing import Tokens
from services.training.per_unit import UnitGradients
from services.training.plan import run_training
from services.training.public_model import DEFAULT, resolve
from services.training.train import plan

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
    trained = run_training(plan(Corpus(corpus.path), output, parts=parts, options=OPTIONS))
    assert trained.trained == parts
    return time.monotonic() - begun


def users_per_s(tokens: int, users: int, rounds: int = 3) -> dict[str, float]:
    """Returns users a second of both implementations, for users with this number of tokens."""
    random = np.random.default_rng(0)
    units = [random.integers(1, 40000, tokens).astype(np.int32) for _ in range(users)]
    options, cpu = DP_SGD_TRAINING, torch.device("cpu")
    gradients = UnitGradients(with_lora(resolve(), DEFAULT, options, cpu).train(), options.block)
    sums: dict[str, Callable[[Sequence[Tokens]], Any]] = {
        "privmix": lambda units: gradients.clipped_sum(units, 1.0),
        "opacus": _opacus(with_lora(resolve(), DEFAULT, options, cpu).train()),
    }
    taken: dict[str, list[float]] = {name: [] for name in sums}
    for _ in range(1 + rounds):  # the first round warms up
        for name, clipped_sum in sums.items():
            begun = time.process_time()
            clipped_sum(units)
            taken[name].append(time.process_time() - begun)
    speeds = {name: users / median(times[1:]) for name, times in taken.items()}
    return speeds | {"ratio": speeds["privmix"] / speeds["opacus"]}


def _opacus(model: Any) -> Callable[[Sequence[Tokens]], None]:
    """Returns a function that sums the clipped gradients of users of the same length, one block each."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
    hooked = GradSampleModule(model, loss_reduction="sum", strict=False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    sgd = torch.optim.SGD(weights, lr=0.0)
    optimizer = DPOptimizer(sgd, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=1)

    def clipped_sum(units: Sequence[Tokens]) -> None:
        inputs = torch.from_numpy(np.stack(units).astype(np.int64))
        chunks = torch.split(inputs, max(1, TOKENS_AT_ONCE["cpu"] // inputs.shape[1]))
        for chunk in chunks:
            logits = hooked(input_ids=chunk, use_cache=False).logits[:, :-1].float()
            losses = cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="none").view(len(chunk), -1)
            torch.autograd.backward(losses.mean(dim=1).sum())
            optimizer.signal_skip_step(do_skip=chunk is not chunks[-1])
            optimizer.step()
            optimizer.zero_grad()

    return clipped_sum


def benchmark(
    as_json: JsonOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="2 and 8 parts of a small corpus.")] = False,
    few: Annotated[int, typer.Option(min=1)] = 16,
    many: Annotated[int, typer.Option(min=2)] = 256,
    users: Annotated[int, typer.Option(min=1, help="Of the corpus; some 120 tokens each.")] = 512,
) -> None:
    """Time the training of few and of many parts of one corpus."""
    if quick:
        few, many, users = 2, 8, 16
    torch.set_num_threads(1)
    lengths = {64: 4} if quick else {64: 32, 128: 16, 512: 4}
    private = {tokens: users_per_s(tokens, count, rounds=1 if quick else 3) for tokens, count in lengths.items()}
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
        "dp_sgd": private,
    }
    if as_json:
        print(json.dumps(numbers, indent=2))
    else:
        print(
            f"{many} parts take {numbers['ratio']:.2f} times as long as {few} ({taken[many]:.0f} s, {taken[few]:.0f} s)"
        )
        for tokens, speeds in private.items():
            print(
                f"DP-SGD, users of {tokens} tokens: {speeds['privmix']:.2f} a second, with Opacus "
                f"{speeds['opacus']:.2f} ({speeds['ratio']:.2f} times)"
            )


if __name__ == "__main__":
    typer.run(benchmark)
