"""Computes and stores the rows of models and the outcomes of protocols over one text, each only once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import ray

from privmix.foundation.fan_out import run_as_ray_tasks
from privmix.foundation.progress import Display
from privmix.laboratory.evaluation import tasks
from privmix.laboratory.evaluation.cases import Case, Outcomes
from privmix.laboratory.evaluation.ensembles import TrainedEnsemble
from privmix.laboratory.evaluation.options import Precision
from privmix.laboratory.evaluation.rows import EnsembleRows, is_whole, row_file
from privmix.laboratory.evaluation.text import EvaluationText
from privmix.training.manifest import Adapter

ROWS, OUTCOMES = "rows", "outcomes"
# The maximum number of protocols in a task: enough to share the distributions, few enough to distribute and resume.
_PROTOCOLS_AT_ONCE = 16
# The maximum number of models in a task: enough to share the public pass, few enough to distribute and resume.
_MODELS_AT_ONCE = 8


class Workbench:
    """Computes missing results on the connected Ray cluster."""

    def __init__(
        self, base: Path, revision: str, text: EvaluationText, output: Path, precision: Precision, display: Display
    ) -> None:
        """Initializes the workbench for the public model in `base` with its `revision`.

        Ensembles on private bases that were trained from it are read on these.
        """
        self.text = text
        self.outcomes = Outcomes(output / OUTCOMES, text)
        self._base = base
        self._revision = revision
        self._rows = output / ROWS
        self._precision = precision
        self._display = display

    @property
    def public_files(self) -> EnsembleRows:
        """The files with the rows of the public model, without any other."""
        public = self._path(self._revision)
        return EnsembleRows(_head(public), public, ())

    def base_files(self, ensemble: TrainedEnsemble) -> EnsembleRows:
        """Returns the files with the rows of the base model of an ensemble, which is also the only other model."""
        revision, public = ensemble.manifest.base_revision, self.public_files
        own = self._path(revision)
        original = None if revision == self._revision else (public.head, public.public)
        return EnsembleRows(_head(own), own, (own,), original=original)

    def files(self, ensemble: TrainedEnsemble, adapters: Sequence[Adapter]) -> EnsembleRows:
        """Returns the files with the rows of an ensemble's base model and of these of its models."""
        manifest = ensemble.manifest
        paths = (self._path(manifest.base_revision, each.sha256, manifest.part_kind) for each in adapters)
        return replace(self.base_files(ensemble), models=tuple(paths))

    def compute_rows(self, ensembles: Iterable[tuple[TrainedEnsemble, Sequence[Adapter]]]) -> None:
        """Computes the hidden states of base models and of models that are missing, and removes all others.

        Args:
            ensembles: with the models of each that are needed.

        Raises:
            WorkError: a task failed.
        """
        self._rows.mkdir(mode=0o700, parents=True, exist_ok=True)
        bases, wanted = {self._path(self._revision): self._base}, {}
        for ensemble, adapters in ensembles:
            bases[self._path(ensemble.manifest.base_revision)] = ensemble.base
            for path, adapter in zip(self.files(ensemble, adapters).models, adapters, strict=True):
                wanted[path] = ensemble, adapter
        kept = {*bases, *map(_head, bases), *wanted}
        for path in set(self._rows.iterdir()) - kept:
            path.unlink()  # rows of another text or ensemble are private and useless here
        missing_bases = [path for path in bases if not is_whole(path, self.text.positions)]
        missing = [path for path in wanted if not is_whole(path, self.text.positions)]
        if not missing and not missing_bases:
            return
        self._display.say(f"evaluating {len(missing) + len(missing_bases)} models on the held-out text")
        text = ray.put(self.text)
        own = {f"model {bases[path].name}": (bases[path], text, self._precision, path) for path in missing_bases}
        self._run(tasks.score_base, {name: (*given, _head(given[-1])) for name, given in own.items()})
        size = min(_MODELS_AT_ONCE, -(-len(missing) // int(ray.cluster_resources().get("CPU", 1))))
        jobs: dict[str, Sequence[Any]] = {}
        for base, on_base in groupby(missing, key=lambda path: wanted[path][0].base):
            paths = list(on_base)
            for group in (paths[first : first + size] for first in range(0, len(paths), size)):
                models = [wanted[path] for path in group]
                names = [f"{ensemble.directory.name}/{adapter.name}" for ensemble, adapter in models]
                files = [ensemble.files(adapter) for ensemble, adapter in models]
                name = " to ".join(dict.fromkeys((names[0], names[-1])))
                jobs[name] = base, text, self._precision, files, group
        self._run(tasks.score_adapters, jobs)

    def _run(self, function: Any, jobs: Mapping[str, Sequence[Any]]) -> None:
        device = int(ray.cluster_resources().get("GPU", 0) >= 1)
        for _ in run_as_ray_tasks(function, jobs, self._display, gpus=device):
            pass

    def compute_outcomes(self, cases: Sequence[Case]) -> None:
        """Computes the missing outcomes of cases over all runs. A task runs several cases that read the same rows.

        Raises:
            WorkError: a task failed.
        """
        by_rows: dict[tuple[int, EnsembleRows], list[Case]] = {}
        for run in range(len(self.text.runs)):
            for case in dict.fromkeys(cases):
                if self.outcomes.get(case, run) is None:
                    by_rows.setdefault((run, case.files), []).append(case)
        if not by_rows:
            return
        groups: dict[str, tuple[int, list[Case]]] = {}
        for (run, _), group in by_rows.items():
            for start in range(0, len(group), _PROTOCOLS_AT_ONCE):
                groups[f"run {run + 1}, {len(groups) + 1}"] = run, group[start : start + _PROTOCOLS_AT_ONCE]
        protocols = {case for group in by_rows.values() for case in group}
        self._display.say(f"evaluating {len(protocols)} protocols over {len(self.text.runs)} runs")
        text, arguments = self.text, {}
        for name, (run, group) in groups.items():
            at = text.runs[run]
            planned = [(case.settings, case.protocol) for case in group]
            arguments[name] = planned, group[0].files, at, text.true_tokens[at], text.contexts[at]
        for name, outcomes in run_as_ray_tasks(tasks.trials, arguments, self._display):
            run, group = groups[name]
            for case, outcome in zip(group, outcomes, strict=True):
                self.outcomes.put(case, run, outcome)

    def _path(self, revision: str, adapter: str | None = None, part_kind: str | None = None) -> Path:
        return self._rows / row_file(revision, adapter, part_kind, self.text.digest, self._precision)


def _head(states: Path) -> Path:
    """Returns the file with the output layer of the base model with these hidden states."""
    return states.with_suffix(".safetensors")
