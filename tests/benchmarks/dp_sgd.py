"""Searches the recipe of DP-SGD on public text: `python -m tests.benchmarks.dp_sgd CORPUS.jsonl --output FOLDER`.

CORPUS is public or set-aside text, by user. A tenth of the users is held out; the others train an adapter by each
recipe, with the code of `privmix train-base`, in this process. In each step a few of them stand for its batch: the
noise is scaled by their share of it, so that the signal has the ratio to the noise that the whole batch would give it.
The few are drawn anew in each step, because the same ones would be learnt by heart. An interrupted run continues with
the files in FOLDER.

- `gain`: over the public model in nats per held-out token; then by the tokens before the position.
- `seconds`: processor time of the training, on one thread.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from peft import PeftModel
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from privmix.foundation.files import write_files
from privmix.training.corpus import Corpus
from privmix.training.dp_sgd import planned
from privmix.training.options import DP_SGD_TRAINING, PLAIN_TARGETS, DpSgdOptions, TrainingOptions
from privmix.training.packing import Tokens, contributions
from privmix.training.per_unit import train_adapter
from privmix.training.public_model import DEFAULT, resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import CorpusArgument, OutputOption, RecipesOption, chosen, show
from tests.benchmarks.public_text import held_apart

CONTEXT = 256
CONTEXTS = ((1, 16), (17, 64), (65, 128), (129, 256))
"""Ranges of the number of tokens before a position."""


@dataclass(frozen=True)
class TrainingRecipe:
    """The options of a training that differ from the defaults.

    Attributes:
        batch: the average number of users in a step; None for all.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    private: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None

    def training(self) -> TrainingOptions:
        return TrainingOptions.checked(**DP_SGD_TRAINING.model_dump() | dict(self.options))

    def guarantee(self, epsilon: float, population: int) -> DpSgdOptions:
        batches = {} if self.batch is None else {"expected_batch": self.batch, "population": population}
        return DpSgdOptions.checked(epsilon=epsilon, **batches, **self.private)


def _v(rank: int, rate: float, **private: Any) -> TrainingRecipe:
    options = {"targets": ("v_proj",), "rank": rank, "learning_rate": rate}
    return TrainingRecipe(options, {"steps": 12} | private)


_EARLIER = {"targets": ("q_proj", "v_proj"), "rank": 4, "block": 128, "learning_rate": 2e-3}
RECIPES: Mapping[str, TrainingRecipe] = {
    # 2 epochs of 64 users in 274, the first block of each.
    "earlier": TrainingRecipe(_EARLIER, {"steps": 9, "blocks": 1, "matrices": "both"}, batch=64),
    "earlier, full batch": TrainingRecipe(_EARLIER, {"steps": 9, "blocks": 1, "matrices": "both"}),
    "v, rank 4, rate 5e-4": _v(4, 5e-4),
    "v, rank 4, rate 1e-3": _v(4, 1e-3),
    "v, rank 4, rate 2e-3": _v(4, 2e-3),
    "v, rank 4, rate 4e-3": _v(4, 4e-3),
    "v, rank 4, rate 1e-2": _v(4, 1e-2),
    "v, rank 4, rate 3e-2": _v(4, 3e-2),
    "v, rank 4, rate 1e-2, 24 steps": _v(4, 1e-2, steps=24),
    "all, rank 4, rate 5e-3": TrainingRecipe({"targets": PLAIN_TARGETS, "learning_rate": 5e-3}),
    "v, rank 4, rate 1e-3, 24 steps": _v(4, 1e-3, steps=24),
    "v, rank 4, rate 2e-3, 24 steps": _v(4, 2e-3, steps=24),
    "v, rank 4, rate 1e-3, 48 steps": _v(4, 1e-3, steps=48),
    "v, rank 4, rate 2e-3, 2 times the clip": _v(4, 2e-3, clip=2.0),
    "v, rank 1, rate 5e-4": _v(1, 5e-4),
    "v, rank 1, rate 1e-3": _v(1, 1e-3),
    "v, rank 16, rate 1e-3": _v(16, 1e-3),
    "v, rank 4, rate 1e-3, both": _v(4, 1e-3, matrices="both"),
    "v, rank 4, rate 2e-3, both": _v(4, 2e-3, matrices="both"),
    "v, rank 4, rate 1e-2, 6 steps": _v(4, 1e-2, steps=6),
    "v, rank 4, rate 2e-2, 6 steps": _v(4, 2e-2, steps=6),
    "v, rank 4, rate 3e-2, 4 steps": _v(4, 3e-2, steps=4),
    "default": TrainingRecipe(),
}


@dataclass(frozen=True)
class DpSgdBench:
    """A split corpus, and the directory of the results."""

    output: Path
    model: Path
    corpus: Corpus
    held_out: tuple[Tokens, ...]

    @classmethod
    def of(cls, corpus: Path, output: Path, user_limit: int, held_out_users: int) -> "DpSgdBench":
        train, held_out = held_apart(Corpus(corpus), output, user_limit)
        model = resolve()
        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = contributions(held_out, tokenizer, "user", CONTEXT + 1)
        return cls(output, model, train, tuple(_sample(texts, held_out_users)))

    def measure(
        self, name: str, recipe: TrainingRecipe, epsilon: float, population: int, users: int
    ) -> dict[str, float]:
        """Measures one recipe, or loads its stored results."""
        folder = self.output / f"{name.replace(', ', '-').replace(' ', '-')}-{epsilon:g}-{users}-{population}"
        results = folder / "results.json"
        if not results.exists():
            folder.mkdir(exist_ok=True)
            seconds = self._train(folder, recipe, epsilon, population, users)
            results.write_text(json.dumps(self._gains(folder) | {"seconds": seconds}))
        measured: dict[str, float] = json.loads(results.read_bytes())
        return measured

    def _train(self, folder: Path, recipe: TrainingRecipe, epsilon: float, population: int, users: int) -> float:
        private = recipe.guarantee(epsilon, population)
        begun = time.process_time()
        train_for(
            population,
            self.model,
            self.corpus,
            users,
            recipe.training(),
            private,
            folder,
        )
        return time.process_time() - begun

    def _gains(self, folder: Path) -> dict[str, float]:
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.bfloat16)
        adapted = PeftModel.from_pretrained(model, folder).eval()
        gains = []
        for text in self.held_out:
            with adapted.disable_adapter():
                public = _losses(adapted, text)
            gains.append(public - _losses(adapted, text))
        measured = {"gain": float(np.concatenate(gains).mean())}
        for first, last in CONTEXTS:
            measured[f"{first}-{last}"] = float(np.concatenate([gain[first - 1 : last] for gain in gains]).mean())
        return measured


def train_for(
    population: int,
    model: Path,
    corpus: Corpus,
    users: int,
    options: TrainingOptions,
    private: DpSgdOptions,
    folder: Path,
    *,
    report: Callable[[float], None] = lambda done: None,
) -> None:
    """Trains an adapter as on a population, of which a few users stand for each step's batch; writes it to a folder.

    Args:
        population: the number of users. If the corpus has fewer, each stands for several.
        users: the average number of users in a step.
        report: called with the fraction done.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    units = _sample(contributions(corpus, tokenizer, "user", private.blocks * options.block), population)
    event = planned(private)
    batch = event.sampling_rate * population
    standing = min(users, batch, len(units))
    files = train_adapter(
        model,
        DEFAULT,
        units,
        options,
        0,
        report,
        noise_multiplier=event.noise_multiplier * standing / batch,
        sampling_rate=standing / len(units),
        steps=event.steps,
        clip=private.clip,
        matrices=private.matrices,
    )
    write_files(folder, files)


def _losses(model: Any, tokens: Tokens) -> NDArray[np.float32]:
    """Returns the loss of each token but the first in nats."""
    inputs = torch.from_numpy(tokens.astype(np.int64))
    with torch.inference_mode():
        logits = model(input_ids=inputs[None]).logits[0, :-1].float()
        losses: NDArray[np.float32] = cross_entropy(logits, inputs[1:], reduction="none").numpy()
    return losses


def _sample(texts: Sequence[Tokens], count: int) -> list[Tokens]:
    chosen = np.random.default_rng(0).permutation(len(texts))[:count]
    return [texts[index] for index in chosen if len(texts[index]) > 1]


def benchmark(
    corpus: CorpusArgument,
    output: OutputOption,
    recipe: RecipesOption = None,
    epsilon: Annotated[float, typer.Option(help="With delta 1e-5.")] = 8.0,
    population: Annotated[int, typer.Option(min=1, help="The number of users that the noise is for.")] = 274,
    users: Annotated[int, typer.Option(min=1, help="The number of users that train.")] = 64,
    user_limit: Annotated[int, typer.Option(min=1, help="The characters of each user's text that are used.")] = 3000,
    held_out: Annotated[int, typer.Option(min=1, help="The largest number of held-out users.")] = 64,
    quick: Annotated[bool, typer.Option("--quick", help="One recipe on two users.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Trains and scores recipes, and prints their table."""
    torch.set_num_threads(1)
    if quick:
        recipe, users, user_limit, held_out = ["v, rank 1, rate 1e-3"], 2, 400, 2
    recipes = chosen(recipe, RECIPES)
    bench = DpSgdBench.of(corpus, output, user_limit, held_out)
    measured = {}
    for name, each in recipes.items():
        measured[name] = bench.measure(name, each, epsilon, population, users)
        print(f"{name}: {measured[name]}", file=sys.stderr, flush=True)
    show(measured, as_json)


if __name__ == "__main__":
    typer.run(benchmark)
