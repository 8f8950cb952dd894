"""Compares the protocols that ask parts for tokens at equal budgets, on the rows that `gain` keeps.

    python -m tests.benchmarks.budgets --output FOLDER --demo --corpus CORPUS.jsonl [--json]

FOLDER is the one of `python -m tests.benchmarks.gain`; what is missing there is trained. Four readers of 2,000 tokens
stand for equal shares of all parts, and each held-out position for an equal share of the tokens; accounts are charged
as in the ledger. For each corpus, number of parts and budget at delta 1e-5:

- the gain over the public model in nats a token, with its 95 % interval over windows of 50 positions;
- `ahead`: what individual budgets gain more than the exponential mechanism, window by window, and `ratio`, the ratio
  of both gains.
"""

from collections.abc import Mapping
from itertools import product
from typing import Annotated, Any

import torch
import typer

from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.rows import RowReader
from privmix.laboratory.evaluation.text import EvaluationText
from privmix.laboratory.evaluation.trial import TrialResult, run_trials
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.public import Public, PublicSettings
from privmix_cluster.options import JsonOption
from tests.benchmarks.gain import PARTS as STANDING
from tests.benchmarks.gain import benches
from tests.benchmarks.options import CorporaOption, DemoOption, EnsembleSizesOption, OutputOption, show
from tests.benchmarks.standing import TOKENS, Planned, few_exponential, few_individual, few_pmixed, rounded

EPSILONS = (2.0, 8.0)
Windows = list[tuple[int, float]]
"""The number of tokens and the sum of -log p in nats of each window of all runs."""


def measure(reader: RowReader, text: EvaluationText, parts: int, epsilon: float, tokens: int) -> dict[str, Any]:
    """Returns the gains of each protocol with one budget."""
    methods: Mapping[str, Planned] = {
        "public": (PublicSettings(), Public(STANDING)),
        "PMixed": few_pmixed(epsilon, tokens, parts, STANDING),
        "exponential": few_exponential(epsilon, tokens, parts, STANDING),
        "individual": few_individual(IndividualSettings(epsilon=epsilon, tokens=tokens), parts, STANDING),
    }
    runs = [
        run_trials(list(methods.values()), reader, run, text.true_tokens[run], released=tokens) for run in text.runs
    ]
    windows = {name: _windows([run[index] for run in runs]) for index, name in enumerate(methods)}
    public = windows.pop("public")
    gains = {name: _ahead(public, own) for name, own in windows.items()}
    return {
        "epsilon": epsilon,
        "tokens": tokens,
        "parts": parts,
        "gain": {name: rounded(gain) for name, gain in gains.items()},
        "ahead": rounded(_ahead(windows["exponential"], windows["individual"])),
        "ratio": round(gains["individual"].mean / gains["exponential"].mean, 2),
    }


def _windows(runs: list[TrialResult]) -> Windows:
    return [window for run in runs for window in run.windows]


def _ahead(before: Windows, after: Windows) -> Estimate:
    """Estimates by how many nats a token one method is ahead of another. A window counts where both can release all."""
    both = [(a, b) for a, b in zip(before, after, strict=True) if a[0] == b[0]]
    return Estimate.of_ratio([a[1] - b[1] for a, b in both], [a[0] for a, _ in both])


def benchmark(
    output: OutputOption,
    corpus: CorporaOption = [],  # noqa: B006
    demo: DemoOption = False,
    parts: EnsembleSizesOption = [64, 128],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="Small parts of a small demo corpus, one budget.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures the gains at each budget and prints a table."""
    torch.set_num_threads(1)
    budgets = list(product(EPSILONS, TOKENS))[-1:] if quick else list(product(EPSILONS, TOKENS))
    measured = {}
    for name, bench in benches(corpus, output, demo, quick).items():
        rows = bench.parts_rows()
        measured[name] = [measure(rows, bench.text, size, *budget) for size, budget in product(parts, budgets)]
    show(measured, as_json)


if __name__ == "__main__":
    typer.run(benchmark)
