"""Measures ensembles on a private base beside DP-SGD with all of epsilon, on the same positions of held-out users.

    python -m tests.benchmarks.private_base dialogues.csv --held-out others.csv --user-field ID --text-field dialogue \
        --output FOLDER --parts 64 --parts 128 --json

The corpus is public or set-aside text, by user. All of its users train by DP-SGD, at full batch, and all parts are
trained. `--users` and `--standing` let fewer stand for all, with the noise scaled to their share. Without `--held-out`,
a tenth of the users is held out. How much of epsilon goes to a base follows from the rule of `privmix plan
--users`, which knows the numbers of users and tokens alone. Of the shares that it gives for an epsilon, the least and
the largest are trained (with `--fractions 1` the middle one), and each cell takes the nearer one.

An interrupted run continues with the files in FOLDER: after the last training by DP-SGD, the last part, and the last
rows that were computed. It uses `--processes` processes of one thread.

For each epsilon, method, number of parts and number of tokens:

- `gain`: over the public model in nats a token, with its 95 % interval over held-out users.
- `over_dp_sgd`: that gain less the one of DP-SGD with all of epsilon, user by user.

`privmix plan --users` looks up what a base gains, and what parts add to it, in a table
(`services/privmix/training/base_gain.json`). --write puts this corpus into it, beside those measured before.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
import typer
from transformers import AutoTokenizer

from privmix.engine.engine import AdapterFiles
from privmix.foundation.files import building, write_atomically, write_files
from privmix.foundation.units import DELTA
from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.text import Block, EvaluationText, Positions, cut_blocks, streams_of_users
from privmix.laboratory.evaluation.trial import TrialResult, run_trials
from privmix.privacy.protocols.ensemble import Ensemble, EnsembleSettings
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.public import Public, PublicSettings
from privmix.training import per_unit
from privmix.training.adapter import Files, train_adapter
from privmix.training.corpus import Corpus
from privmix.training.demo import TRAIN, write_demo_corpus
from privmix.training.dp_sgd import UNUSED, planned
from privmix.training.expectation import TABLE as PART_TABLE
from privmix.training.expectation import Population, Requirements, propose
from privmix.training.options import DP_SGD_TRAINING, DpSgdOptions, TokenBudget, TrainingOptions
from privmix.training.packing import Tokens, contributions, tokenize
from privmix.training.partition import Partition, PartShare
from privmix.training.private_base import merge_adapter
from privmix.training.public_model import DEFAULT, resolve
from privmix.training.splitting import BASE_TABLE, divide, signal
from tests.benchmarks.gain import QUICK_USERS, USERS
from tests.benchmarks.options import OutputOption, WriteOption, show
from tests.benchmarks.standing import (
    TOKENS,
    Planned,
    few_exponential,
    few_individual,
    held_apart,
    kept_rows,
    kept_states,
    rounded,
)

CONTEXT = 256
PUBLIC = "public"
NOT_PRIVATE = "not private"
ALONE = "alone"


@dataclass(frozen=True)
class GainRow:
    """The gains of one method in nats a token.

    Attributes:
        method: a protocol, "DP-SGD", or "not private".
        gain: over the public model: the mean and its 95 % interval.
        over_dp_sgd: over DP-SGD with all of epsilon.
        runs: the mean gain of each run, which is one held-out user's.
        parts: of the ensemble; None for DP-SGD.
        tokens: that its budget lasts for; None for any number.
        base_epsilon: of DP-SGD, alone or below the ensemble; None for an ensemble on the public model.
    """

    method: str
    gain: Sequence[float | None]
    over_dp_sgd: Sequence[float | None]
    runs: Sequence[float]
    parts: int | None = None
    tokens: int | None = None
    base_epsilon: float | None = None


RowsByEpsilon = Mapping[float, Sequence[GainRow]]
"""The rows of each epsilon."""


def gain_row(
    references: Sequence[Sequence[TrialResult]], own: Sequence[TrialResult], method: str, **cell: Any
) -> GainRow:
    """Compares the outcomes of a method, one a run, with the public model's and with those of DP-SGD.

    Args:
        cell: the numbers of parts and tokens, and the base's epsilon, where the method has them.
    """
    gains, ahead = (
        [before.loss - after.loss for before, after in zip(other, own, strict=True)] for other in references
    )
    runs = [round(gain, 4) for gain in gains]
    return GainRow(method, rounded(Estimate.of(gains)), rounded(Estimate.of(ahead)), runs, **cell)


@dataclass(frozen=True)
class Size:
    """The size of a measurement.

    Attributes:
        users: who train by DP-SGD, for all; None for all of them.
        population: the number of users that they stand for; None for that of the corpus.
        standing: parts that are trained, for all; None for all of them.
        fractions: of an epsilon, for each of which a base is trained; 1 or 2 at most.
        runs: the number of held-out users. Each user's text is one run.
        run_tokens: the positions of a run, drawn from the user's first `CONTEXT` tokens.
    """

    users: int | None = None
    population: int | None = None
    standing: int | None = None
    fractions: int = 2
    runs: int = 100
    run_tokens: int = 48


NamedProtocol = tuple[str, Planned]
"""A protocol with a name that says all that determines it."""


@dataclass(frozen=True)
class PrivateBaseBench:
    """A corpus, the text of held-out users, and the directory of what is trained and measured.

    Attributes:
        delta: of all guarantees.
    """

    output: Path
    size: Size
    train: Corpus
    text: EvaluationText
    public_model: Path
    delta: float = DELTA

    @classmethod
    def of(cls, train: Corpus, held_out: Corpus, output: Path, size: Size) -> Self:
        """Opens a directory; what was trained there is kept. A folder is for one corpus, recipe and size."""
        model = resolve()
        text = positions_of_users(held_out, AutoTokenizer.from_pretrained(model), size)
        return cls(output, size, train, text, model)

    @cached_property
    def population(self) -> int:
        return self.size.population or self._counted[0]

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of the population."""
        users, tokens = self._counted
        return tokens * self.population // users

    @cached_property
    def _counted(self) -> tuple[int, int]:
        """The numbers of users and of tokens of the corpus."""
        return len({document.user for document in self.train}), sum(map(len, self.streams(1).values()))

    def streams(self, parts: int) -> dict[PartShare, Tokens]:
        tokenizer = AutoTokenizer.from_pretrained(self.public_model)
        return tokenize(self.train, tokenizer, Partition(bytes(32), parts))

    def shares(self, epsilon: float, parts: Sequence[int]) -> dict[tuple[int, int], float]:
        """Returns the share of epsilon for a base, by the number of parts and of tokens: at most `fractions` below 1.

        The rule is that of `privmix plan --users`. A share of 1 is DP-SGD, and one of 0 has no base.
        """
        found, size = {}, Population(self.population, self.tokens)
        for count in parts:
            for tokens in TOKENS:
                budget = TokenBudget(epsilon=epsilon, delta=self.delta, tokens=tokens)
                wanted = Requirements(size, budget, parts=count)
                division = divide(wanted, propose(wanted))
                found[count, tokens] = division.share if division else 0.0
        between = sorted({share for share in found.values() if 0 < share < 1})
        few = [between[len(between) // 2]] if self.size.fractions == 1 else [between[0], between[-1]]
        kept = few if len(between) > self.size.fractions else between
        return {
            cell: min(kept, key=lambda other: abs(other - share)) if 0 < share < 1 else share
            for cell, share in found.items()
        }

    def model(self, epsilon: float | None) -> tuple[str, Path]:
        """Returns the name and the directory of the public model, or of the one that DP-SGD trained with an epsilon."""
        if epsilon is None:
            return PUBLIC, self.public_model
        return f"base-{epsilon:g}", self.output / f"base-{epsilon:g}"

    def train_base(self, epsilon: float) -> None:
        """Trains a model by DP-SGD, unless it is there."""
        name, model = self.model(epsilon)
        adapter = self.output / f"dp-sgd-{epsilon:g}"
        if not adapter.exists():
            with building(adapter) as unfinished:
                write_files(unfinished, self._dp_sgd(epsilon))
        if not model.exists():
            with building(model) as unfinished:
                merge_adapter(self.public_model, adapter, unfinished)
        kept_states(model, self.text, self.output, name)

    def _dp_sgd(self, epsilon: float) -> Files:
        """Trains an adapter as on the population, of which a few users stand for each step's batch.

        If the corpus has fewer users than the population, each stands for several.
        """
        options, private = DP_SGD_TRAINING, DpSgdOptions(epsilon=epsilon, delta=self.delta)
        tokenizer = AutoTokenizer.from_pretrained(self.public_model)
        texts = contributions(self.train, tokenizer, private.blocks * options.block)
        order = np.random.default_rng(0).permutation(len(texts))[: self.population]
        units = [texts[index] for index in order if len(texts[index]) > 1]
        event = planned(private)  # at full batch
        standing = min(self.size.users or self.population, len(units))
        return per_unit.train_adapter(
            self.public_model,
            DEFAULT,
            units,
            options,
            0,
            lambda done: _say(f"dp-sgd-{epsilon:g}: {done:.0%}"),
            noise_multiplier=event.noise_multiplier * standing / self.population,
            sampling_rate=standing / len(units),
            steps=event.steps,
            clip=private.clip,
        )

    def train_parts(self, epsilon: float | None, parts: int) -> None:
        """Trains the parts on a model that are not there yet."""
        name, model = self.model(epsilon)
        streams, options = self.streams(parts), TrainingOptions()
        for part in range(self.size.standing or parts):
            folder = self._part(name, parts, part)
            if not folder.exists():
                with building(folder) as unfinished:
                    files = train_adapter(model, DEFAULT, streams[PartShare(part)], options, 0, lambda done: None)
                    write_files(unfinished, files)
        _say(f"trained {parts} parts on {name}")

    def score(
        self, epsilon: float | None, parts: int, methods: Sequence[NamedProtocol]
    ) -> dict[str, Sequence[TrialResult]]:
        """Runs methods on all runs.

        Args:
            parts: N, of the ensemble; 0 for the model alone.
        """
        name, model = self.model(epsilon)
        states = kept_states(model, self.text, self.output, name)
        original = None if epsilon is None else kept_states(self.public_model, self.text, self.output, PUBLIC)
        rows = [
            (AdapterFiles(self._part(name, parts, part), "reader"), self.output / f"{name}-{parts}-{part}.npy")
            for part in range(min(parts, self.size.standing or parts))
        ]
        reader = kept_rows(model, self.text, states, rows, original)
        planned = [method for _, method in methods]
        runs = [run_trials(planned, reader, run, self.text.true_tokens[run]) for run in self.text.runs]
        _say(f"scored {parts} parts on {name}")
        return {label: own for (label, _), own in zip(methods, zip(*runs, strict=True), strict=True)}

    def all_methods(
        self, base: float | None, parts: int, on_base: Mapping[float, Mapping[tuple[int, int], float]]
    ) -> list[NamedProtocol]:
        """Returns all protocols of an ensemble, without privacy and at each budget that has this base or none.

        Args:
            on_base: the epsilon of the base of each cell, by the total epsilon, and the numbers of parts and tokens.
        """
        standing = min(parts, self.size.standing or parts)
        return [
            (NOT_PRIVATE, (EnsembleSettings(), Ensemble(standing))),
            *(
                method
                for epsilon, cells in on_base.items()
                for tokens in TOKENS
                if base is None or cells.get((parts, tokens)) == base
                for method in self.methods(epsilon, parts, tokens, base)
            ),
        ]

    def methods(self, epsilon: float, parts: int, tokens: int, base_epsilon: float | None) -> Iterator[NamedProtocol]:
        """Yields the protocols of a cell, of which the rows of few may stand for equal shares."""
        standing = self.size.standing or parts
        base = None if base_epsilon is None else planned(DpSgdOptions(epsilon=base_epsilon, delta=self.delta))
        individual = IndividualSettings(epsilon=epsilon, delta=self.delta, tokens=tokens).on_base(base)
        yield (
            label("exponential", epsilon, tokens),
            few_exponential(epsilon, tokens, parts, min(standing, parts), base),
        )
        yield label("individual", epsilon, tokens), few_individual(individual, parts, min(standing, parts))

    def _part(self, name: str, parts: int, part: int) -> Path:
        return self.output / f"{name}-{parts}-parts" / str(part)


def label(method: str, epsilon: float, tokens: int) -> str:
    return f"{method}, {epsilon:g}, {tokens}"


def positions_of_users(held_out: Corpus, tokenizer: Any, size: Size) -> EvaluationText:
    """Returns a run of each held-out user: some of the first positions, drawn without a secret: the text is public."""
    random = np.random.default_rng(1)
    blocks, runs, positions = list[Block](), list[Positions](), 0
    for stream in streams_of_users(held_out, tokenizer):
        block = next(iter(cut_blocks(stream[:CONTEXT], CONTEXT)), None)
        if block is None or len(block.targets) < 2 or len(runs) == size.runs:
            continue
        count = min(size.run_tokens, len(block.targets))
        blocks.append(replace(block, targets=tuple(sorted(random.permutation(block.targets)[:count].tolist()))))
        runs.append(positions + np.arange(count))
        positions += count
    return EvaluationText(tuple(blocks), tuple(runs))


def measure(bench: PrivateBaseBench, epsilons: Sequence[float], parts: Sequence[int], processes: int) -> RowsByEpsilon:
    """Trains and scores what is missing, and returns the rows of each epsilon."""
    shares = {epsilon: bench.shares(epsilon, parts) for epsilon in epsilons}
    on_base: dict[float, dict[tuple[int, int], float]] = {
        epsilon: {cell: share * epsilon for cell, share in of.items() if 0 < share < 1}
        for epsilon, of in shares.items()
    }
    below = sorted({base for of in on_base.values() for base in of.values()})
    cells = [(None, count) for count in parts] + sorted(
        {(base, count) for of in on_base.values() for (count, _), base in of.items()}
    )
    methods = {(base, count): bench.all_methods(base, count, on_base) for base, count in cells}
    methods |= {(base, 0): [(ALONE, (PublicSettings(), Public(2)))] for base in (None, *epsilons, *below)}
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        pool.submit(kept_states, bench.public_model, bench.text, bench.output, PUBLIC).result()
        list(pool.map(bench.train_base, sorted({*epsilons, *below}, reverse=True)))
        list(pool.map(bench.train_parts, *zip(*cells, strict=True)))
        scored = pool.map(bench.score, *zip(*((*cell, own) for cell, own in methods.items()), strict=True))
        found = dict(zip(methods, scored, strict=True))
    return {epsilon: list(_rows(found, epsilon, parts, on_base[epsilon])) for epsilon in epsilons}


def _rows(
    found: Mapping[tuple[float | None, int], Mapping[str, Sequence[TrialResult]]],
    epsilon: float,
    parts: Sequence[int],
    on_base: Mapping[tuple[int, int], float],
) -> Iterator[GainRow]:
    """Yields DP-SGD with all of epsilon, the bases, and the ensembles on the public model and on their bases."""
    references = [found[below, 0][ALONE] for below in (None, epsilon)]
    for trained in sorted({epsilon, *on_base.values()}, reverse=True):
        yield gain_row(references, found[trained, 0][ALONE], "DP-SGD", base_epsilon=trained)
    for count in parts:
        for base in (None, *sorted({on_base[cell] for cell in on_base if cell[0] == count})):
            outcomes = found[base, count]
            yield gain_row(references, outcomes[NOT_PRIVATE], NOT_PRIVATE, parts=count, base_epsilon=base)
            for tokens in TOKENS:
                if base is None or on_base.get((count, tokens)) == base:
                    for method in ("exponential", "individual"):
                        own = outcomes[label(method, epsilon, tokens)]
                        yield gain_row(references, own, method, parts=count, tokens=tokens, base_epsilon=base)


def table_of(measured: RowsByEpsilon, bench: PrivateBaseBench) -> dict[str, Any]:
    """Returns what `privmix plan` reads: gains of DP-SGD by their signal, and what ensembles keep of theirs on a base.

    The share kept on a base is that of all its cells together.
    """
    by_signal: dict[float, Sequence[float]] = {}
    kept: dict[float, float] = {}
    for rows in measured.values():
        bases = {row.base_epsilon: row for row in rows if row.parts is None}
        alone = {(row.method, row.parts, row.tokens or 0): row for row in rows if row.tokens and not row.base_epsilon}
        for epsilon, base in bases.items():
            assert epsilon is not None
            trained = planned(DpSgdOptions(epsilon=epsilon, delta=bench.delta))
            by_signal[signal(trained, bench.population)] = base.runs
            above = [row for row in rows if row.tokens and row.base_epsilon == epsilon]
            if above:
                added = np.sum([np.subtract(row.runs, base.runs) for row in above])
                without = np.sum([alone[row.method, row.parts, row.tokens or 0].runs for row in above])
                kept[float(np.mean(base.runs))] = round(float(added / without), 3)
    parts = max(row.parts or 0 for rows in measured.values() for row in rows)
    stood = {"users": bench.size.users or bench.population, "standing": bench.size.standing or parts}
    return {
        "size": asdict(bench.size) | stood,
        "population": bench.population,
        "gain_by_signal": {f"{key:.4g}": by_signal[key] for key in sorted(by_signal)},
        "kept_by_gain": {f"{key:.4g}": kept[key] for key in sorted(kept)},
    }


def made_with(user_limit: int | None) -> dict[str, Any]:
    """Returns what determines the gain of a base, but for the corpus and the size."""
    private = DpSgdOptions().model_dump(mode="json", include={"clip", "blocks", "steps"})
    recipe = DP_SGD_TRAINING.model_dump(mode="json", exclude=UNUSED) | private
    return {"model": DEFAULT, "user_limit": user_limit, "recipe": recipe}


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def benchmark(
    output: OutputOption,
    corpus: Annotated[Path | None, typer.Argument(help="Public or set-aside text; without it, the demo's.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="Text of other users; by default a tenth is held out.")] = None,
    user_field: Annotated[str, typer.Option(help="The field of the user.")] = "user",
    text_field: Annotated[str, typer.Option(help="The field of the text.")] = "text",
    epsilon: Annotated[list[float], typer.Option(help="The total, at delta 1e-5; repeatable.")] = [2.0, 8.0],  # noqa: B006
    parts: Annotated[list[int], typer.Option(min=2, help="Of an ensemble; repeatable.")] = [64],  # noqa: B006
    users: Annotated[int | None, typer.Option(min=1, help="Users that train by DP-SGD, for all.")] = None,
    standing: Annotated[int | None, typer.Option(min=2, help="Parts that are trained, for all.")] = None,
    fractions: Annotated[int, typer.Option(min=1, max=2, help="Bases for each epsilon, at most.")] = 2,
    user_limit: Annotated[int | None, typer.Option(min=1, help="The characters of each user that are used.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Each has one thread.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Two users and two parts stand for all.")] = False,
    write: WriteOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Trains, measures and prints the tables."""
    torch.set_num_threads(1)
    if quick and write:
        raise typer.BadParameter("write: a quick measurement is no table for `privmix plan`")
    size = Size(users, standing=standing, fractions=fractions)
    if quick:
        size, epsilon, parts, user_limit = Size(2, 2000, 2, runs=1, run_tokens=16), epsilon[-1:], [8], 300
    name = "demo" if corpus is None else corpus.stem
    measured_parts = json.loads(PART_TABLE.read_text())["part_kind"]["reader"]["corpora"]
    if write and name not in measured_parts:
        raise typer.BadParameter(f"write: the table of parts lacks {name}; measure it by `gain --write`")
    train, others = _texts(corpus, held_out, output, (user_field, text_field), user_limit, quick)
    bench = PrivateBaseBench.of(train, others, output, size)
    measured = measure(bench, epsilon, parts, processes)
    if write:
        _write(name, table_of(measured, bench), made_with(user_limit))
    corpora = {name: {f"{each:g}": [asdict(row) for row in rows] for each, rows in measured.items()}}
    described = asdict(size) | {"population": bench.population, "tokens": bench.tokens}
    show({"size": described, "user_limit": user_limit, "corpora": corpora}, as_json)


def _texts(
    corpus: Path | None,
    held_out: Path | None,
    output: Path,
    fields: tuple[str, str],
    user_limit: int | None,
    quick: bool,
) -> tuple[Corpus, Corpus]:
    """Returns the text to train on, and that of held-out users."""
    if corpus is not None and held_out is not None:
        if user_limit is not None:
            raise typer.BadParameter("user-limit: has an effect only where users are held out here, without --held-out")
        return Corpus(corpus, *fields), Corpus(held_out, *fields)
    if corpus is None:
        write_demo_corpus(output / "demo-corpus", users=QUICK_USERS if quick else USERS)
        given = Corpus(output / "demo-corpus" / TRAIN)
    else:
        given = Corpus(corpus, *fields)
    return held_apart(given, output, user_limit)


def _write(name: str, table: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    before = json.loads(BASE_TABLE.read_text())
    kept = before["corpora"] if all(before.get(key) == value for key, value in settings.items()) else {}
    content = {
        "measured": datetime.now(UTC).date().isoformat(),
        **settings,
        "command": "python -m tests.benchmarks.private_base CORPUS --output FOLDER --write",
        "corpora": {**kept, name: table},
    }
    write_atomically(BASE_TABLE, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    typer.run(benchmark)
