"""Measures the gain of an ensemble over the public model, and the fraction of it that a clip radius keeps.

    python -m tests.benchmarks.gain --output FOLDER --demo --corpus CORPUS.jsonl [--write]

`privmix plan --users` looks its gains up in the table that this benchmark writes
(`training/gain.json`, with --write). Each corpus must be public, or set aside for this. Some users are held
out; the others' text makes parts with the default options of `privmix train`, once readers and once texts (`KINDS`):

- four parts: the gain of their mean, and the fraction of it that PMixed, the exponential mechanism (m = 4, all four
  drawn) and individual budgets keep at each radius;
- one part of each of some other sizes and the mean of the four: the gain of a part by its amount of text.

An interrupted run continues with the finished files in FOLDER.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoTokenizer

from privmix.engine.engine import AdapterFiles
from privmix.engine.part_text import text_files
from privmix.foundation.files import building, write_atomically, write_files
from privmix.laboratory.evaluation.rows import RowReader
from privmix.laboratory.evaluation.text import EvaluationText, held_out_text
from privmix.laboratory.evaluation.trial import run_trials
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.ensemble import Ensemble, EnsembleSettings
from privmix.privacy.protocols.exponential import Exponential, ExponentialSettings
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings
from privmix.privacy.protocols.public import Public, PublicSettings
from privmix.privacy.settings import Settings
from privmix.training.adapter import train_adapter
from privmix.training.corpus import Corpus
from privmix.training.demo import TRAIN, write_demo_corpus
from privmix.training.expectation import TABLE
from privmix.training.options import TrainingOptions
from privmix.training.packing import Tokens, tokenize
from privmix.training.partition import Partition, PartShare
from privmix.training.public_model import DEFAULT, resolve
from tests.benchmarks.options import CorporaOption, DemoOption, OutputOption, WriteOption
from tests.benchmarks.standing import FewRows, held_apart, kept_rows, kept_states

PARTS = 4
RADII = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
RUNS, RUN_TOKENS, QUICK_RUN_TOKENS = 3, 400, 20
USERS, QUICK_USERS = 1000, 60
"""Of the demo corpus."""
CONTEXT = 256


@dataclass(frozen=True)
class Kind:
    """What the parts are, the tokens of each of the four, and those of the single parts."""

    options: TrainingOptions
    part_tokens: int
    sizes: tuple[int, ...]


KINDS = (
    Kind(TrainingOptions(), 2000, (500, 8000)),
    Kind(TrainingOptions(part_kind="text"), 1024, (256,)),
)
QUICK_KINDS = tuple(Kind(kind.options, 128, (64,)) for kind in KINDS)


@dataclass(frozen=True)
class GainBench:
    """One corpus with one kind of parts: its directory, and the tokens of its parts and of its held-out text."""

    kind: Kind
    output: Path
    model: Path
    text: EvaluationText
    parts: Tokens

    @classmethod
    def of(cls, kind: Kind, corpus: Path, output: Path, run_tokens: int = RUN_TOKENS) -> "GainBench":
        model = resolve()
        train, held_out = held_apart(Corpus(corpus), output)
        tokenizer = AutoTokenizer.from_pretrained(model)
        text = held_out_text(held_out, tokenizer, context=CONTEXT, tokens=run_tokens, runs=RUNS)
        # One stream in the order of the users' hashes, which is cut into parts of equal size.
        stream = tokenize(train, tokenizer, Partition(bytes(32), 1))[PartShare(0)]
        return cls(kind, output, model, text, stream)

    def measure(self) -> dict[str, Any]:
        """Returns gains in nats per token, and kept fractions, each as a list over the runs."""
        size = self.kind.part_tokens
        parts = {f"part-{part}": self._adapter(f"part-{part}", slice(part * size, None), size) for part in range(PARTS)}
        kept, ensemble = self._kept(self._rows(parts))
        gains = {size: np.mean([self._gain({name: files}) for name, files in parts.items()], axis=0).tolist()}
        for other in self.kind.sizes:
            name = f"size-{other}"
            gains[other] = self._gain({name: self._adapter(name, slice(PARTS * size, None), other)})
        by_size = {str(tokens): gains[tokens] for tokens in sorted(gains)}
        return {"ensemble_gain": ensemble, "kept": kept, "gain_by_part_tokens": by_size}

    def _adapter(self, name: str, where: slice, tokens: int) -> AdapterFiles:
        directory = self.output / name
        if not directory.exists():
            text = self.parts[where][:tokens]
            if len(text) < tokens:
                raise typer.BadParameter(f"{self.output.name}: the corpus has too little text for {name}")
            options = self.kind.options
            files = (
                text_files(text, options.text)
                if options.part_kind == "text"
                else train_adapter(self.model, DEFAULT, text, options, 0, lambda _: None)
            )
            with building(directory) as unfinished:
                write_files(unfinished, files)
            print(f"{self.output}: made {name}", file=sys.stderr, flush=True)
        return AdapterFiles(directory, self.kind.options.part_kind)

    def _rows(self, adapters: Mapping[str, AdapterFiles]) -> RowReader:
        states = kept_states(self.model, self.text, self.output, "public")
        parts = [(files, self.output / f"{name}.npy") for name, files in adapters.items()]
        return kept_rows(self.model, self.text, states, parts)

    def _losses(self, reader: RowReader, planned: list[tuple[Settings, Protocol]]) -> list[list[float]]:
        """Returns the mean loss in nats per token of each protocol (outer) on each run (inner)."""
        runs = [run_trials(planned, reader, run, self.text.true_tokens[run]) for run in self.text.runs]
        return [[outcomes[index].loss for outcomes in runs] for index in range(len(planned))]

    def _gain(self, adapter: Mapping[str, AdapterFiles]) -> list[float]:
        """Returns the gain of one adapter over the public model in nats per token, for each run."""
        planned: list[tuple[Settings, Protocol]] = [(PublicSettings(), Public(1)), (EnsembleSettings(), Ensemble(1))]
        public, own = self._losses(self._rows(adapter), planned)
        return [before - after for before, after in zip(public, own, strict=True)]

    def _kept(self, reader: RowReader) -> tuple[dict[str, Any], list[float]]:
        planned: list[tuple[Settings, Protocol]] = [
            (PublicSettings(), Public(PARTS)),
            (EnsembleSettings(), Ensemble(PARTS)),
        ]
        for radius in RADII:
            unlimited = {"epsilon": None, "tokens": 2**40, "radius": radius}
            planned.append((PMixedSettings(q=1.0, **unlimited), PMixed(PARTS, 1.0, radius)))
            planned.append((ExponentialSettings(**unlimited), Exponential(PARTS, PARTS, radius)))
            planned.append(FewRows.at(radius, PARTS))
        public, ensemble, *others = self._losses(reader, planned)
        gains = [before - after for before, after in zip(public, ensemble, strict=True)]

        def fractions(losses: list[float]) -> list[float]:
            return [(public[run] - losses[run]) / gains[run] for run in range(RUNS)]

        names = ("pmixed", "exponential", "individual")
        kept: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        for (radius, name), losses in zip(product(RADII, names), others, strict=True):
            kept[name][str(radius)] = fractions(losses)
        return kept, gains


def benchmark(
    output: OutputOption,
    corpus: CorporaOption = [],  # noqa: B006
    demo: DemoOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small parts of a small demo corpus, few tokens.")] = False,
    write: WriteOption = False,
) -> None:
    """Measures the gains and prints the table."""
    torch.set_num_threads(1)
    if quick and write:
        raise typer.BadParameter("write: a quick measurement is no table for `privmix plan`")
    kinds, users, run_tokens = (QUICK_KINDS, QUICK_USERS, QUICK_RUN_TOKENS) if quick else (KINDS, USERS, RUN_TOKENS)
    corpora = {path.stem: path for path in corpus}
    if demo or quick:
        write_demo_corpus(output / "demo-corpus", users=users)
        corpora["demo"] = output / "demo-corpus" / TRAIN
    table = {
        "measured": datetime.now(UTC).date().isoformat(),
        "model": DEFAULT,
        "parts": PARTS,
        "held_out_tokens": RUNS * run_tokens,
        "command": "python -m tests.benchmarks.gain --output FOLDER --demo --corpus CORPUS.jsonl --write",
        "part_kind": {
            kind.options.part_kind: {
                "part_tokens": kind.part_tokens,
                "training": kind.options.recipe,
                "corpora": {
                    name: GainBench.of(kind, path, output / kind.options.part_kind / name, run_tokens).measure()
                    for name, path in corpora.items()
                },
            }
            for kind in kinds
        },
    }
    content = json.dumps(table, indent=1) + "\n"
    print(content, end="")
    if write:
        write_atomically(TABLE, content.encode())


if __name__ == "__main__":
    typer.run(benchmark)
