"""Compares the gain of plain LoRA and of readers: `python -m tests.benchmarks.adapters CORPUS.jsonl --output FOLDER`.

CORPUS is public or set-aside text, by user. Some users are held out; each 1/16 of the others trains an adapter with the
code of `privmix train`, in this process. Each recipe is trained and scored once; an interrupted run continues with the
files in FOLDER. --recipe selects recipes; the default is all.

- `gain`: gain of a part's adapter over the public model in nats per held-out token, the mean over parts.
- `of plain`: the ratio of this gain to the gain of `plain`.
- `ensemble gain at RADIUS`, with two parts or more: the gain of the parts' mean after PMixed's projection at this
  radius. 0.4 is that of 16 parts for a user's epsilon of 8 and 1,024 tokens, or of 64 parts and 16,384 tokens.
- `seconds`: processor time of a part's training, on one thread.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import AutoTokenizer

from privmix.engine.engine import AdapterFiles
from privmix.foundation.files import write_files
from privmix.laboratory.evaluation.rows import EnsembleRows, RowReader
from privmix.laboratory.evaluation.tasks import score, score_public
from privmix.laboratory.evaluation.text import EvaluationText, held_out_text
from privmix.laboratory.evaluation.trial import run_trials
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings
from privmix.privacy.protocols.public import Public
from privmix.training.adapter import train_adapter
from privmix.training.corpus import Corpus
from privmix.training.options import TrainingOptions
from privmix.training.packing import Tokens, tokenize
from privmix.training.partition import Partition, PartShare
from privmix.training.public_model import DEFAULT, resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import CorpusArgument, OutputOption, RecipesOption, chosen, show
from tests.benchmarks.public_text import held_apart

PARTS = 16
CONTEXT = 256
RADII = (0.1, 0.4, 1.6)
UNLIMITED = PMixedSettings(epsilon=None, delta=1e-5, tokens=1024)
"""Two parts at these radii would cost far more than a usual budget."""

PLAIN = TrainingOptions.checked(part_kind="lora", rank=4, alpha=32, block=128, batch=4, epochs=3, learning_rate=1e-3)
READER = TrainingOptions.checked(rank=4, alpha=32, block=128, batch=4, epochs=3, learning_rate=1e-3)


def _with(options: TrainingOptions, **changes: object) -> TrainingOptions:
    return TrainingOptions.checked(**options.model_dump() | changes)


RECIPES: Mapping[str, TrainingOptions] = {
    "plain": PLAIN,
    "plain, q and v": _with(PLAIN, targets=("q_proj", "v_proj")),
    "plain, rate 5e-4": _with(PLAIN, learning_rate=5e-4),
    "plain, rate 2e-3": _with(PLAIN, learning_rate=2e-3),
    "plain, warm-up 0.1": _with(PLAIN, warm_up=0.1),
    "plain, 2 blocks a step": _with(PLAIN, batch=2),
    "plain, 2 epochs": _with(PLAIN, epochs=2),
    "plain, 2 epochs, rate 5e-4": _with(PLAIN, epochs=2, learning_rate=5e-4),
    "reader": READER,
    "reader, rate 2.5e-4": _with(READER, learning_rate=2.5e-4),
    "reader, rate 5e-4": _with(READER, learning_rate=5e-4),
    "reader, rate 2e-3": _with(READER, learning_rate=2e-3),
    "reader, warm-up 0.1": _with(READER, warm_up=0.1),
    "reader, warm-up 0.1, rate 2e-3": _with(READER, warm_up=0.1, learning_rate=2e-3),
    "reader, warm-up 0.1, rank 16": _with(READER, warm_up=0.1, rank=16),
    "reader, 2 blocks a step": _with(READER, batch=2),
    "reader, 2 epochs": _with(READER, epochs=2),
    "reader, 2 epochs, rate 5e-4": _with(READER, epochs=2, learning_rate=5e-4),
    "reader, rank 16, alpha 64": _with(READER, rank=16, alpha=64),
    "reader, rank 16, alpha 128": _with(READER, rank=16, alpha=128),
    **{
        f"reader, {layers} layers, rank {rank}, rate {rate:g}": _with(
            READER, layers=layers, rank=rank, alpha=8 * rank if rank == 4 else 64, learning_rate=rate
        )
        for layers, rank, rate in product((4, 8, 12, 15, 30), (4, 16), (5e-4, 7e-4, 1e-3, 2e-3))
    },
    "reader, o and MLP": _with(READER, targets=("o_proj", "gate_proj", "up_proj", "down_proj")),
}


@dataclass(frozen=True)
class AdapterBench:
    """A split corpus and the directory of its results."""

    output: Path
    model: Path
    text: EvaluationText
    parts: tuple[Tokens, ...]

    @classmethod
    def of(cls, corpus: Path, output: Path, parts: int, tokens: int, held_out_tokens: int) -> "AdapterBench":
        model = resolve()
        train, held_out = held_apart(Corpus(corpus), output)
        tokenizer = AutoTokenizer.from_pretrained(model)
        text = held_out_text(held_out, tokenizer, context=CONTEXT, tokens=held_out_tokens, runs=1)
        shares = tokenize(train, tokenizer, Partition(bytes(32), PARTS))
        return cls(output, model, text, tuple(shares[PartShare(part)][:tokens] for part in range(parts)))

    @property
    def head(self) -> Path:
        return self.output / "head.safetensors"

    @property
    def public(self) -> Path:
        path = self.output / "public.npy"
        if not path.exists():
            score_public(self.model, self.text, "auto", self.head, path)
        return path

    def measure(self, name: str, options: TrainingOptions) -> dict[str, float]:
        """Measures one recipe over all parts, or loads its stored results."""
        folder = self.output / name.replace(", ", "-").replace(" ", "-")
        results = folder / f"{len(self.parts)}-parts.json"
        if not results.exists():
            seconds = [self._train(folder, part, options) for part in range(len(self.parts))]
            results.write_text(json.dumps(self._score(folder, options) | {"seconds": float(np.mean(seconds))}))
        measured: dict[str, float] = json.loads(results.read_bytes())
        return measured

    def _train(self, folder: Path, part: int, options: TrainingOptions) -> float:
        directory = folder / str(part)
        if not (directory / "seconds").exists():
            train_adapter(self.model, DEFAULT, self.parts[part][:0], options, 0, lambda _: None)  # loads the model
            begun = time.process_time()
            files = train_adapter(self.model, DEFAULT, self.parts[part], options, part, lambda _: None)
            seconds = time.process_time() - begun
            write_files(directory, files)
            (directory / "seconds").write_text(str(seconds))
        return float((directory / "seconds").read_text())

    def _score(self, folder: Path, options: TrainingOptions) -> dict[str, float]:
        rows = EnsembleRows(self.head, self.public, tuple(folder / f"{part}.npy" for part in range(len(self.parts))))
        adapters = [AdapterFiles(folder / str(part), options.part_kind) for part in range(len(self.parts))]
        score(self.model, list(zip(adapters, rows.models, strict=True)), self.text, "auto")
        reader, truth = RowReader.open(rows), torch.from_numpy(self.text.true_tokens)
        gains = []
        for positions in np.array_split(self.text.runs[0], 64):
            public, parts = reader(positions)
            own = parts.view(len(public), len(adapters), -1) - public[:, None]
            gains.append(own.gather(2, truth[positions, None, None].expand(-1, len(adapters), 1)).mean(1).flatten())
        measured = {"gain": float(torch.cat(gains).mean())}
        if len(adapters) > 1:
            protocols = Public(len(adapters)), *(PMixed(len(adapters), 1.0, radius) for radius in RADII)
            planned, run = [(UNLIMITED, protocol) for protocol in protocols], self.text.runs[0]
            alone, *released = run_trials(planned, reader, run, self.text.true_tokens[run])
            for radius, outcome in zip(RADII, released, strict=True):
                measured[f"ensemble gain at {radius}"] = alone.loss - outcome.loss
        for path in rows.models:
            path.unlink()
        return measured


def benchmark(
    corpus: CorpusArgument,
    output: OutputOption,
    recipe: RecipesOption = None,
    parts: Annotated[int, typer.Option(min=1, max=PARTS, help=f"Parts that are trained, of {PARTS}.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each that are used.")] = 12000,
    held_out_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are scored.")] = 5000,
    quick: Annotated[bool, typer.Option("--quick", help="Two recipes of two small parts.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Trains and scores recipes, and prints their table."""
    torch.set_num_threads(1)
    if quick:
        recipe, parts, tokens, held_out_tokens = ["plain", "reader"], 2, 256, 100
    recipes = chosen(recipe, RECIPES)
    bench = AdapterBench.of(corpus, output, parts, tokens, held_out_tokens)
    measured = {name: bench.measure(name, options) for name, options in recipes.items()}
    plain = {key: value for key, value in measured.get("plain", {}).items() if "gain" in key}
    for row in measured.values():
        row |= {f"{key} of plain": row[key] / gain for key, gain in plain.items()}
    show(measured, as_json)


if __name__ == "__main__":
    typer.run(benchmark)
