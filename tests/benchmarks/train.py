"""Measures the training of parts, and of DP-SGD, on one core: `python -m tests.benchmarks.train --json`.

- `kinds`: adapters an hour of processor time, of one part by the default options: a reader of all layers, of the last
  half (the default) and of the last quarter, plain LoRA by the same code, and plain LoRA in an ordinary loop around
  PEFT's model. `over_all_layers` has the ratios to the reader of all layers.
- `dp_sgd`: users a second whose clipped gradients are summed by `privmix train-base`, by the number of tokens of a
  user.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from privmix.training.adapter import gains_from_bfloat16, train_adapter, with_lora
from privmix.training.corpus import Corpus
from privmix.training.demo import TRAIN, write_demo_corpus
from privmix.training.options import DP_SGD_TRAINING, PLAIN_TARGETS, TrainingOptions
from privmix.training.packing import Tokens, even_size, pack, tokenize
from privmix.training.partition import Partition, PartShare
from privmix.training.per_unit import UnitGradients
from privmix.training.public_model import DEFAULT, resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import show

CPU = torch.device("cpu")
ALL_LAYERS = "reader, all layers"


def users_per_s(lengths: Sequence[int], rounds: int) -> float:
    """Returns users a second, for users with these numbers of tokens."""
    random = np.random.default_rng(0)
    units = [random.integers(1, 40000, tokens).astype(np.int32) for tokens in lengths]
    options = DP_SGD_TRAINING
    gradients = UnitGradients(with_lora(resolve(), DEFAULT, options, CPU), options.block)
    taken = []
    for _ in range(1 + rounds):  # the first round warms up
        begun = time.process_time()
        gradients.clipped_sum(units, 1.0)
        taken.append(time.process_time() - begun)
    return len(units) / median(taken[1:])


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
    quick: Annotated[bool, typer.Option("--quick", help="A small corpus.")] = False,
    part_tokens: Annotated[int, typer.Option(min=1, help="Of the part by which kinds are compared.")] = 2000,
) -> None:
    """Time the training of kinds of parts, and of DP-SGD."""
    torch.set_num_threads(1)
    part_tokens = 256 if quick else part_tokens
    lengths = {64: 4} if quick else {64: 32, 128: 16, 512: 4}
    units = {str(tokens): [tokens] * count for tokens, count in lengths.items()}
    rounds = 1 if quick else 3
    private = {name: users_per_s(of, rounds) for name, of in units.items()}
    with tempfile.TemporaryDirectory() as folder:
        write_demo_corpus(Path(folder), users=64)
        kinds = adapters_per_hour(Corpus(Path(folder) / TRAIN), part_tokens, rounds)
    show({"kinds": kinds, "dp_sgd": private}, as_json)


if __name__ == "__main__":
    typer.run(benchmark)
