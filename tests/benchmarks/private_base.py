"""Measures ensembles on a private base beside DP-SGD with all of epsilon, scaled down, on the same positions.

    python -m tests.benchmarks.private_base --output FOLDER --demo --corpus CORPUS.jsonl [--write]

Each corpus is public or set-aside text, by user. A tenth of the users is held out. Few stand for all, so that one core
suffices: some users train by DP-SGD, whose noise is scaled by their share of the others, and some readers, each of the
users of one of the ensemble's parts, stand for equal shares of them. `privmix compare --on-base` trains all of it. An
interrupted run continues with the files in FOLDER.

For each epsilon, method and number of tokens:

- `gain`: over the public model in nats a token, with its 95 % interval over runs that share no text; then by the
  tokens before the position.
- `over_dp_sgd`: that gain less the one of DP-SGD with all of epsilon, run by run.

`privmix plan --users` looks up what a base gains, and what parts add to it, in a table
(`services/training/base_gain.json`). --write puts these corpora into it, beside those measured before.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from services.engine.engine import AdapterFiles
from services.files import building, write_atomically, write_files
from services.laboratory.evaluation.estimate import Estimate
from services.laboratory.evaluation.rows import RowReader
from services.laboratory.evaluation.text import EvaluationText, held_out_text
from services.laboratory.evaluation.trial import CONTEXTS, TrialResult, run_trials
from services.privacy.protocols.dp_sgd import DpSgdEvent
from services.privacy.protocols.ensemble import Ensemble, EnsembleSettings
from services.privacy.protocols.individual import IndividualSettings
from services.privacy.protocols.public import Public, PublicSettings
from services.training.adapter import train_adapter
from services.training.corpus import Corpus
from services.training.dp_sgd import UNUSED, planned
from services.training.expectation import TABLE as PART_TABLE
from services.training.options import DP_SGD_TRAINING, DpSgdOptions, TrainingOptions
from services.training.packing import Tokens, tokenize
from services.training.partition import Partition, PartShare
from services.training.private_base import merge_adapter
from services.training.public_model import DEFAULT, resolve
from services.training.splitting import BASE_TABLE, signal
from tests.benchmarks.dp_sgd import train_for
from tests.benchmarks.gain import QUICK_USERS, USERS
from tests.benchmarks.options import CorporaOption, DemoOption, OutputOption, WriteOption
from tests.benchmarks.public_text import corpora_by_name, held_apart
from tests.benchmarks.standing import (
    TOKENS,
    Planned,
    few_exponential,
    few_individual,
    kept_rows,
    kept_states,
    rounded,
)

CONTEXT = 256
BASE_SHARE = 0.5
"""The share of epsilon of the measured bases."""


@dataclass(frozen=True)
class GainRow:
    """The gains of one method in nats a token.

    Attributes:
        method: a protocol, "DP-SGD", or "not private".
        tokens: that its budget lasts for; None for any number.
        base_epsilon: of DP-SGD, alone or below the ensemble; None for an ensemble on the public model.
        gain: over the public model: the mean and its 95 % interval.
        over_dp_sgd: over DP-SGD with all of epsilon.
        contexts: the mean gain by the range of the number of tokens before the position; None without a position.
        runs: the mean gain of each run.
    """

    method: str
    tokens: int | None
    base_epsilon: float | None
    gain: Sequence[float | None]
    over_dp_sgd: Sequence[float | None]
    contexts: Mapping[str, float | None]
    runs: Sequence[float]

    @classmethod
    def of(
        cls,
        method: str,
        tokens: int | None,
        base_epsilon: float | None,
        own: Sequence[TrialResult],
        public: Sequence[TrialResult],
        whole: Sequence[TrialResult],
    ) -> "GainRow":
        """Compares a method's outcomes, one a run, with the public model's and with those of DP-SGD."""
        gains, ahead = (
            [before.loss - after.loss for before, after in zip(other, own, strict=True)] for other in (public, whole)
        )
        contexts: dict[str, float | None] = {}
        for number, (first, last) in enumerate(CONTEXTS):
            count = sum(outcome.contexts[number][0] for outcome in public)
            gained = sum(
                before.contexts[number][1] - after.contexts[number][1]
                for before, after in zip(public, own, strict=True)
            )
            contexts[f"{first} to {last}"] = round(gained / count, 4) if count else None
        runs = [round(gain, 4) for gain in gains]
        return cls(
            method, tokens, base_epsilon, rounded(Estimate.of(gains)), rounded(Estimate.of(ahead)), contexts, runs
        )


@dataclass(frozen=True)
class Size:
    """The size of a measurement.

    Attributes:
        users: who train by DP-SGD, for all.
        parts: of the ensemble.
        standing: parts that are trained, for all.
        runs: of held-out text.
        run_tokens: the positions of a run.
    """

    users: int
    parts: int
    standing: int
    runs: int = 8
    run_tokens: int = 128


@dataclass(frozen=True)
class PrivateBaseBench:
    """A split corpus, and the directory of what is trained and measured."""

    output: Path
    size: Size
    train: Corpus
    text: EvaluationText
    public_model: Path

    @classmethod
    def of(cls, corpus: Path, output: Path, user_limit: int, size: Size) -> "PrivateBaseBench":
        """Opens a directory; what was trained there is kept.

        Raises:
            typer.BadParameter: it was trained there with other settings.
        """
        _claim(output, {**made_with(user_limit), "size": {**asdict(size), "standing": None}})
        train, held_out = held_apart(corpus, output, user_limit)
        model = resolve()
        tokenizer = AutoTokenizer.from_pretrained(model)
        text = held_out_text(held_out, tokenizer, context=CONTEXT, tokens=size.run_tokens, runs=size.runs, seed=1)
        return cls(output, size, train, text, model)

    @cached_property
    def population(self) -> int:
        return len({document.user for document in self.train})

    @cached_property
    def _streams(self) -> dict[PartShare, Tokens]:
        tokenizer = AutoTokenizer.from_pretrained(self.public_model)
        return tokenize(self.train, tokenizer, Partition(bytes(32), self.size.parts))

    def measure(self, epsilon: float) -> list[GainRow]:
        """Returns the gains of each method at a total epsilon: DP-SGD with all, and with a share of it, come first."""
        base_epsilon = BASE_SHARE * epsilon
        public, whole = self._of_model(self.public_model), self._of_model(self._base(epsilon))
        below = self._of_model(self._base(base_epsilon))
        rows = [
            GainRow.of("DP-SGD", None, epsilon, whole, public, whole),
            GainRow.of("DP-SGD", None, base_epsilon, below, public, whole),
        ]
        event = planned(DpSgdOptions(epsilon=base_epsilon))
        for model, of_base, spent in (
            (self.public_model, None, None),
            (self._base(base_epsilon), event, base_epsilon),
        ):
            methods = list(self._methods(epsilon, of_base))
            outcomes = self._outcomes(self._reader(model, self.size.standing), [method for _, _, method in methods])
            rows += [
                GainRow.of(name, tokens, spent, own, public, whole)
                for (name, tokens, _), own in zip(methods, outcomes, strict=True)
            ]
        return rows

    def signal(self, epsilon: float) -> float:
        """Returns the signal of DP-SGD with all users at an epsilon (`splitting.signal`)."""
        return signal(planned(DpSgdOptions(epsilon=epsilon)), self.population)

    def _of_model(self, model: Path) -> list[TrialResult]:
        return self._outcomes(self._reader(model, 0), [(PublicSettings(), Public(2))])[0]

    def _methods(self, epsilon: float, base: DpSgdEvent | None) -> Iterator[tuple[str, int | None, Planned]]:
        """Yields protocols for all parts, of which the rows of few stand for equal shares."""
        parts, standing = self.size.parts, self.size.standing
        for tokens in TOKENS:
            yield "exponential", tokens, few_exponential(epsilon, tokens, parts, standing, base)
            individual = IndividualSettings(epsilon=epsilon, tokens=tokens).on_base(base)
            yield "individual", tokens, few_individual(individual, parts, standing)
        yield "not private", None, (EnsembleSettings(), Ensemble(standing))

    def _outcomes(self, reader: RowReader, methods: Sequence[Planned]) -> list[list[TrialResult]]:
        """Returns the outcome of each method (outer) on each run (inner)."""
        text = self.text
        runs = [run_trials(methods, reader, run, text.true_tokens[run], text.contexts[run]) for run in text.runs]
        return [list(own) for own in zip(*runs, strict=True)]

    def _base(self, epsilon: float) -> Path:
        """Returns the model that DP-SGD trained."""
        adapter, model = self.output / f"dp-sgd-{epsilon:g}", self.output / f"base-{epsilon:g}"
        if not adapter.exists():
            with building(adapter) as unfinished:
                train_for(
                    self.population,
                    self.public_model,
                    self.train,
                    self.size.users,
                    DP_SGD_TRAINING,
                    DpSgdOptions(epsilon=epsilon),
                    unfinished,
                )
            _say(f"trained {adapter.name}")
        if not model.exists():
            with building(model) as unfinished:
                merge_adapter(self.public_model, adapter, unfinished)
        return model

    def _reader(self, model: Path, standing: int) -> RowReader:
        """Trains the first `standing` parts on a model, computes their rows, and reads them. Keeps what is there."""
        public = kept_states(self.public_model, self.text, self.output, "public")
        if model == self.public_model:
            name, states, original = "public", public, None
        else:
            name, original = model.name, public
            states = kept_states(model, self.text, self.output, name)
        parts = [(self._part(model, name, part), self.output / f"{name}-{part}.npy") for part in range(standing)]
        return kept_rows(model, self.text, states, parts, original)

    def _part(self, model: Path, name: str, part: int) -> AdapterFiles:
        options = TrainingOptions()
        folder = self.output / f"{name}-part-{part}"
        if not folder.exists():
            with building(folder) as unfinished:
                files = train_adapter(model, DEFAULT, self._streams[PartShare(part)], options, 0, lambda done: None)
                write_files(unfinished, files)
            _say(f"trained {folder.name}")
        return AdapterFiles(folder, options.part_kind)


def table_of(measured: Mapping[float, Sequence[GainRow]], bench: PrivateBaseBench) -> dict[str, Any]:
    """Returns what `privmix plan` reads: gains of DP-SGD by their signal, and what ensembles keep of theirs on a base.

    The share kept is that of all cells of an epsilon together.
    """
    by_signal: dict[float, Sequence[float]] = {}
    kept: dict[float, float] = {}
    for rows in measured.values():
        base = rows[1]
        by_signal |= {bench.signal(row.base_epsilon): row.runs for row in rows[:2] if row.base_epsilon}
        ensembles = [row for row in rows if row.tokens is not None]
        added = np.sum([np.subtract(row.runs, base.runs) for row in ensembles if row.base_epsilon])
        alone = np.sum([row.runs for row in ensembles if not row.base_epsilon])
        kept[float(np.mean(base.runs))] = round(float(added / alone), 3)
    return {
        "size": asdict(bench.size),
        "population": bench.population,
        "gain_by_signal": {f"{key:.4g}": by_signal[key] for key in sorted(by_signal)},
        "kept_by_gain": {f"{key:.4g}": kept[key] for key in sorted(kept)},
    }


def made_with(user_limit: int) -> dict[str, Any]:
    """Returns what determines the gain of a base, but for the corpus and the size."""
    private = DpSgdOptions().model_dump(mode="json", include={"clip", "blocks", "steps", "matrices"})
    recipe = DP_SGD_TRAINING.model_dump(mode="json", exclude=UNUSED) | private
    return {"model": DEFAULT, "user_limit": user_limit, "recipe": recipe}


def _claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes a directory's settings into it, or raises `typer.BadParameter` if it has others."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    if not file.exists():
        write_atomically(file, (json.dumps(settings, indent=1) + "\n").encode())
    elif json.loads(file.read_text()) != settings:
        raise typer.BadParameter(f"output: {folder} has models of other settings ({file.name}); give another directory")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _shown(values: Sequence[float | None]) -> str:
    mean, low, high = values
    return f"{mean:.3f}" if low is None else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _printed(title: str, rows: Sequence[GainRow]) -> Table:
    table = Table("method", "tokens", "base", "gain", "over DP-SGD", *rows[0].contexts, title=title)
    for row in rows:
        tokens = "any" if row.tokens is None else f"{row.tokens:,}"
        base = "-" if row.base_epsilon is None else f"{row.base_epsilon:g}"
        contexts = ("-" if value is None else f"{value:.3f}" for value in row.contexts.values())
        table.add_row(row.method, tokens, base, _shown(row.gain), _shown(row.over_dp_sgd), *contexts)
    return table


def benchmark(
    output: OutputOption,
    corpus: CorporaOption = [],  # noqa: B006
    demo: DemoOption = False,
    epsilon: Annotated[list[float], typer.Option(help="The total, at delta 1e-5; repeatable.")] = [2.0, 8.0],  # noqa: B006
    users: Annotated[int, typer.Option(min=1, help="Users that train by DP-SGD.")] = 48,
    parts: Annotated[int, typer.Option(min=2, help="Of the ensemble.")] = 64,
    standing: Annotated[int, typer.Option(min=2, help="Parts that are trained.")] = 8,
    user_limit: Annotated[int, typer.Option(min=1, help="The characters of each user's text that are used.")] = 1000,
    quick: Annotated[bool, typer.Option("--quick", help="Two users and two parts of a small demo corpus.")] = False,
    write: WriteOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Trains, measures and prints the tables."""
    torch.set_num_threads(1)
    if quick and write:
        raise typer.BadParameter("write: a quick measurement is no table for `privmix plan`")
    size = Size(users, parts, standing)
    if quick:
        size, epsilon, user_limit = Size(2, parts, 2, runs=2, run_tokens=16), epsilon[-1:], 300
    demo_users = (QUICK_USERS if quick else USERS) if demo or quick else None
    corpora = corpora_by_name(corpus, output, demo_users)
    measured_parts = json.loads(PART_TABLE.read_text())["part_kind"]["reader"]["corpora"]
    if write and (missing := sorted(corpora.keys() - measured_parts.keys())):
        raise typer.BadParameter(
            f"write: the table of parts lacks {', '.join(missing)}; measure them by `gain --write`"
        )
    benches = {name: PrivateBaseBench.of(path, output / name, user_limit, size) for name, path in corpora.items()}
    measured = {name: {each: bench.measure(each) for each in epsilon} for name, bench in benches.items()}
    if write:
        alike = made_with(user_limit)
        before = json.loads(BASE_TABLE.read_text())
        kept = before["corpora"] if all(before.get(name) == value for name, value in alike.items()) else {}
        table = {
            "measured": datetime.now(UTC).date().isoformat(),
            **alike,
            "command": "python -m tests.benchmarks.private_base --output FOLDER --demo --corpus CORPUS.jsonl --write",
            "corpora": {**kept, **{name: table_of(rows, benches[name]) for name, rows in measured.items()}},
        }
        write_atomically(BASE_TABLE, (json.dumps(table, indent=1) + "\n").encode())
    if as_json:
        record = {
            name: {f"{each:g}": [asdict(row) for row in rows] for each, rows in by_epsilon.items()}
            for name, by_epsilon in measured.items()
        }
        print(json.dumps({"size": asdict(size), "user_limit": user_limit, "corpora": record}, indent=1))
        return
    for name, by_epsilon in measured.items():
        for each, rows in by_epsilon.items():
            Console(width=150).print(_printed(f"{name}, epsilon {each:g}", rows))


if __name__ == "__main__":
    typer.run(benchmark)
