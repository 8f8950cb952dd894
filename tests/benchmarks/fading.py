"""Measures how the gain of individual budgets fades over one long run of tokens, on the rows that `gain` keeps.

    python -m tests.benchmarks.fading --output FOLDER --demo --corpus CORPUS.jsonl

FOLDER is the one of `python -m tests.benchmarks.gain`; what is missing there is trained, and four readers stand for all
parts. One service releases all tokens from one set of accounts. Each held-out position stands for several tokens in a
row, and positions come in an order that mixes all users, so that each window of tokens is a sample of the whole text.
For each window the benchmark prints the gain over the public model in nats a token: of individual budgets whose horizon
is the run or a sixteenth of it, and of the exponential mechanism with all parts and a budget for the run.
"""

import json
import math
from typing import Annotated

import numpy as np
import torch
import typer

from privmix.laboratory.evaluation.text import Positions
from privmix.laboratory.evaluation.trial import TrialResult, run_trials
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.public import Public, PublicSettings
from tests.benchmarks.gain import PARTS as STANDING
from tests.benchmarks.gain import benches
from tests.benchmarks.options import CorporaOption, DemoOption, OutputOption
from tests.benchmarks.standing import Planned, few_exponential, few_individual

QUICK_TOKENS = 256
EARLIER = 16
"""The run is this many times the shorter horizon."""


def planned(epsilon: float, released: int, parts: int, standing: int) -> dict[str, Planned]:
    """Plans the compared protocols for `parts` parts, of which the rows of `standing` stand for all."""
    methods: dict[str, Planned] = {"public": (PublicSettings(), Public(standing))}
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


def benchmark(
    output: OutputOption,
    corpus: CorporaOption = [],  # noqa: B006
    demo: DemoOption = False,
    parts: Annotated[int, typer.Option(min=2, help="Of the ensemble.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are released.")] = 16_384,
    epsilon: Annotated[float, typer.Option(help="The budget at delta 1e-5.")] = 8.0,
    quick: Annotated[bool, typer.Option("--quick", help="Small parts of a small demo corpus, a short run.")] = False,
) -> None:
    """Prints the gains by window as JSON."""
    torch.set_num_threads(1)
    tokens = QUICK_TOKENS if quick else tokens
    methods = planned(epsilon, tokens, parts, STANDING)
    by_corpus = {}
    for name, bench in benches(corpus, output, demo, quick).items():
        order = mixed(np.concatenate(bench.text.runs))
        outcomes = run_trials(
            list(methods.values()), bench.parts_rows(), order, bench.text.true_tokens[order], released=tokens
        )
        by_name = dict(zip(methods, outcomes, strict=True))
        public = by_name.pop("public")
        by_corpus[name] = {method: gains(own, public) for method, own in by_name.items()}
    print(json.dumps({"parts": parts, "tokens": tokens, "epsilon": epsilon, "gain_by_window": by_corpus}, indent=1))


if __name__ == "__main__":
    typer.run(benchmark)
