"""Measures the training of many small parts, and of DP-SGD: `python -m tests.benchmarks.train --json`.

Trains the same corpus twice with the code of `privmix train`, on one Ray with one core: in few parts and in many.
Before that, it starts Ray and trains one part, so that neither side includes the first load of the public model.

- `ratio`: seconds for many parts over seconds for few. Both train on the same tokens.
- `seconds`, `adapters_per_s`: the values of both sides.
- `kinds`: adapters an hour of processor time, of one part by the default options: a reader of all layers, of the last
  half (the default) and of the last quarter, plain LoRA by the same code, and plain LoRA in an ordinary loop around
  PEFT's model; by the name of the corpus. `over_all_layers` has the ratios to the reader of all layers.
- `dp_sgd`: users a second whose clipped gradients are summed, by the code of `privmix train --dp-sgd` and by Opacus'
  hooks, in alternating passes over the same users, model and adapter on one core; by the number of tokens of a user.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import ray
import torch
import typer
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cluster.options import JsonOption
from services.json_lines import write_lines
from services.training import demo
from services.training.adapter import TOKENS_AT_ONCE, gains_from_bfloat16, train_adapter, with_lora
from services.training.corpus import Corpus
from services.training.options import DP_SGD_TRAINING, PLAIN_TARGETS, TrainingOptions
from services.training.packing import Tokens, even_size, pack, tokenize
from services.training.partition import Partition, PartShare
from services.training.per_unit import UnitGradients
from services.training.plan import run_training
from services.training.public_model import DEFAULT, resolve
from services.training.train import plan
from tests.benchmarks.options import CorporaOption

# A step has about 500 tokens, like the default on one core, so that small parts have some steps.
OPTIONS = TrainingOptions(block=128, batch=4, epochs=1)
CPU = torch.device("cpu")
ALL_LAYERS = "reader, all layers"


def write_corpus(path: Path, users: int) -> Corpus:
    """Writes dialogues of the demo corpus, of ``users`` users."""
    demo.write_demo_corpus(path.parent / "demo", users=users, held_out=0)
    write_lines(
        path, [{"user": document.user, "text": document.text} for document in Corpus(path.parent / "demo" / demo.TRAIN)]
    )
    return Corpus(path)


def seconds(corpus: Corpus, output: Path, parts: int) -> float:
    begun = time.monotonic()
    trained = run_training(plan(Corpus(corpus.name), output, parts=parts, options=OPTIONS))
    assert trained.trained == parts
    return time.monotonic() - begun


def users_per_s(tokens: int, users: int, rounds: int = 3) -> dict[str, float]:
    """Returns users a second of both implementations, for users with this number of tokens."""
    random = np.random.default_rng(0)
    units = [random.integers(1, 40000, tokens).astype(np.int32) for _ in range(users)]
    options = DP_SGD_TRAINING
    gradients = UnitGradients(with_lora(resolve(), DEFAULT, options, CPU).train(), options.block)
    sums: dict[str, Callable[[Sequence[Tokens]], Any]] = {
        "privmix": lambda units: gradients.clipped_sum(units, 1.0),
        "opacus": _opacus(with_lora(resolve(), DEFAULT, options, CPU).train()),
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


def adapters_per_hour(corpus: Corpus, tokens: int, rounds: int) -> dict[str, Any]:
    """Returns adapters an hour of each kind, trained on the first `tokens` tokens of one text."""
    text = tokenize(corpus, AutoTokenizer.from_pretrained(resolve()), Partition(bytes(32), 1))[PartShare(0)][:tokens]
    depth = AutoConfig.from_pretrained(resolve()).num_hidden_layers
    readers: Mapping[str, int | None] = {
        ALL_LAYERS: depth,
        "reader, last half": None,
        "reader, last quarter": depth // 4,
    }
    trainings: Mapping[str, Callable[[Tokens], object]] = {
        **{name: _training(TrainingOptions(layers=layers)) for name, layers in readers.items()},
        "plain LoRA": _training(TrainingOptions(part_kind="lora")),
        "plain LoRA by PEFT": _peft_training(TrainingOptions(part_kind="lora")),
    }
    taken: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(rounds):
        for name, train in trainings.items():
            train(text[:0])  # loads the model
            begun = time.process_time()
            train(text)
            taken[name].append(time.process_time() - begun)
    speeds = {name: 3600 / median(times) for name, times in taken.items()}
    return {
        "tokens": len(text),
        "adapters_per_hour": speeds,
        "over_all_layers": {name: speed / speeds[ALL_LAYERS] for name, speed in speeds.items()},
    }


def _training(options: TrainingOptions) -> Callable[[Tokens], object]:
    return lambda text: train_adapter(resolve(), DEFAULT, text, options, 0, lambda _: None)


def _peft_training(options: TrainingOptions) -> Callable[[Tokens], None]:
    """Returns the training that a user of PEFT writes, with these options' blocks and steps."""
    dtype = torch.bfloat16 if gains_from_bfloat16(CPU) else torch.float32
    lora = LoraConfig(
        r=options.rank, lora_alpha=options.alpha, target_modules=list(PLAIN_TARGETS), task_type="CAUSAL_LM"
    )
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(resolve(), dtype=dtype), lora).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def train(text: Tokens) -> None:
        optimizer = torch.optim.AdamW(weights, lr=1e-3)
        for blocks, labels in _steps(text, options):
            optimizer.zero_grad()
            model(input_ids=blocks, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()

    return train


def _steps(text: Tokens, options: TrainingOptions) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if len(text):
        inputs, labels = pack(text, even_size(len(text), options.block))
        for _ in range(options.epochs):
            yield from zip(inputs.split(options.batch), labels.split(options.batch), strict=True)


def benchmark(
    as_json: JsonOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="2 and 8 parts of a small corpus.")] = False,
    few: Annotated[int, typer.Option(min=1)] = 16,
    many: Annotated[int, typer.Option(min=2)] = 256,
    users: Annotated[int, typer.Option(min=1, help="Of the corpus; some 120 tokens each.")] = 512,
    corpus: CorporaOption = [],  # noqa: B006
    part_tokens: Annotated[int, typer.Option(min=1, help="Of the part by which kinds are compared.")] = 2000,
) -> None:
    """Time the training of few and of many parts of one corpus, of kinds of parts, and of DP-SGD."""
    if quick:
        few, many, users, part_tokens = 2, 8, 16, 256
    torch.set_num_threads(1)
    lengths = {64: 4} if quick else {64: 32, 128: 16, 512: 4}
    rounds = 1 if quick else 3
    private = {tokens: users_per_s(tokens, count, rounds) for tokens, count in lengths.items()}
    with tempfile.TemporaryDirectory() as folder:
        dialogues = write_corpus(Path(folder) / "demo.jsonl", users)
        texts = {path.stem: Corpus(path) for path in corpus} or {"demo": dialogues}
        kinds = {name: adapters_per_hour(text, part_tokens, rounds) for name, text in texts.items()}
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        try:
            seconds(write_corpus(Path(folder) / "warm.jsonl", 2), Path(folder) / "warm", 1)
            taken = {parts: seconds(dialogues, Path(folder) / str(parts), parts) for parts in (few, many)}
        finally:
            ray.shutdown()
    numbers = {
        "ratio": taken[many] / taken[few],
        "seconds": taken,
        "adapters_per_s": {parts: parts / time for parts, time in taken.items()},
        "users": users,
        "kinds": kinds,
        "dp_sgd": private,
    }
    if as_json:
        print(json.dumps(numbers, indent=2))
    else:
        print(
            f"{many} parts take {numbers['ratio']:.2f} times as long as {few} ({taken[many]:.0f} s, {taken[few]:.0f} s)"
        )
        for name, measured in kinds.items():
            ratios = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in measured["over_all_layers"].items())
            print(f"Adapters an hour over those of readers of all layers, {name}: {ratios}")
        for tokens, speeds in private.items():
            print(
                f"DP-SGD, users of {tokens} tokens: {speeds['privmix']:.2f} a second, with Opacus "
                f"{speeds['opacus']:.2f} ({speeds['ratio']:.2f} times)"
            )


if __name__ == "__main__":
    typer.run(benchmark)
