"""Measures how the gain of individual budgets fades over one long run of tokens.

    python -m tests.benchmarks.fading --ensemble ENSEMBLE --held-out HELDOUT.jsonl --output FOLDER

One service releases all tokens from one set of accounts. Each held-out position stands for several tokens in a row, and
positions come in an order that mixes all users, so that each window of tokens is a sample of the whole text. For each
window the benchmark prints the gain over the public model in nats a token: of individual budgets whose horizon is the
run or a sixteenth of it, and of the exponential mechanism with all parts and a budget for the run. Rows are kept in
FOLDER, so that an interrupted run continues.
"""

import json
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import AutoTokenizer

from services.laboratory.evaluation.ensembles import TrainedEnsemble
from services.laboratory.evaluation.rows import RowReader
from services.laboratory.evaluation.text import EvaluationText, Positions, held_out_text
from services.laboratory.evaluation.trial import TrialResult, run_trials
from services.privacy.protocol import Protocol
from services.privacy.protocols.individual import IndividualSettings
from services.privacy.protocols.public import Public, PublicSettings
from services.privacy.settings import Settings
from services.training.corpus import Corpus
from services.training.public_model import resolve
from tests.benchmarks.standing import few_exponential, few_individual, kept_rows, kept_states

RUNS, RUN_TOKENS, CONTEXT = 16, 128, 256
QUICK_RUNS, QUICK_TOKENS = 2, 256
EARLIER = 16
"""The run is this many times the shorter horizon."""


def planned(epsilon: float, released: int, parts: int, standing: int) -> dict[str, tuple[Settings, Protocol]]:
    """Plans the compared protocols for `parts` parts, of which the rows of `standing` stand for all."""
    methods: dict[str, tuple[Settings, Protocol]] = {"public": (PublicSettings(), Public(standing))}
    for horizon in (released, released // EARLIER):
        settings = IndividualSettings(epsilon=epsilon, tokens=horizon)
        methods[f"individual, horizon {horizon:,}"] = few_individual(settings, parts, standing)
    methods["exponential"] = few_exponential(epsilon, released, parts, standing)
    return methods


def mixed(positions: Positions) -> Positions:
    """Returns all positions in an order in which neighbours are far apart in the text."""
    step = next(
        step for step in range(int(len(positions) * 0.618), len(positions)) if math.gcd(step, len(positions)) == 1
    )
    return positions[np.arange(len(positions)) * step % len(positions)]


def gains(own: TrialResult, public: TrialResult) -> list[float | None]:
    """Returns the gain in nats a token in each window; None where a token has probability 0."""
    return [
        round((before - after) / count, 4) if count == possible else None
        for (count, before), (possible, after) in zip(public.windows, own.windows, strict=True)
    ]


def reader(ensemble: TrainedEnsemble, model: Path, text: EvaluationText, output: Path, standing: int) -> RowReader:
    """Reads the rows of the first `standing` parts, and computes the missing ones."""
    adapters = ensemble.manifest.parts[:standing]
    parts = [(ensemble.files(part), output / f"{ensemble.directory.name}-{part.index}.npy") for part in adapters]
    return kept_rows(model, text, kept_states(model, text, output, "public"), parts)


def benchmark(
    ensemble: Annotated[Path, typer.Option(help="The ensemble.")],
    held_out: Annotated[Path, typer.Option(help="Held-out users, JSON Lines with user and text.")],
    output: Annotated[Path, typer.Option(help="Where rows are kept.")],
    tokens: Annotated[int, typer.Option(help="The tokens of the run.")] = 16_384,
    epsilon: Annotated[float, typer.Option(help="The budget at delta 1e-5.")] = 8.0,
    standing: Annotated[int | None, typer.Option(help="So many parts stand for all of them.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Take only each such position.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A short run over each 16th position of little text.")] = False,
) -> None:
    """Prints the gains by window as JSON."""
    torch.set_num_threads(1)
    tokens, every, runs = (QUICK_TOKENS, 16, QUICK_RUNS) if quick else (tokens, every, RUNS)
    output.mkdir(parents=True, exist_ok=True)
    loaded = TrainedEnsemble.load(ensemble)
    model = resolve(loaded.manifest.base_model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = held_out_text(Corpus(held_out), tokenizer, context=CONTEXT, tokens=RUN_TOKENS, runs=runs)
    order = mixed(np.unique(np.concatenate(text.runs)))[::every]
    few = standing or loaded.parts
    methods = planned(epsilon, tokens, loaded.parts, few)
    rows = reader(loaded, model, text, output, few)
    outcomes = run_trials(list(methods.values()), rows, order, text.true_tokens[order], released=tokens)
    by_name = dict(zip(methods, outcomes, strict=True))
    public = by_name.pop("public")
    print(
        json.dumps(
            {
                "parts": loaded.parts,
                "standing": few,
                "tokens": tokens // len(order) * len(order),
                "epsilon": epsilon,
                "gain_by_window": {name: gains(own, public) for name, own in by_name.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    typer.run(benchmark)
