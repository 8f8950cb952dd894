"""Computes and stores the rows of models and the outcomes of protocols over one text, each only once."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import ray

from privmix.engine.engine import AdapterFiles
from privmix.foundation.errors import InputError
from privmix.foundation.fan_out import run_as_ray_tasks
from privmix.foundation.progress import Display
from privmix.foundation.ray_session import connected
from privmix.laboratory.evaluation import tasks
from privmix.laboratory.evaluation.cases import Outcomes, PlannedCase, grouped
from privmix.laboratory.evaluation.ensembles import TrainedEnsemble
from privmix.laboratory.evaluation.options import Precision
from privmix.laboratory.evaluation.rows import HIDDEN_TYPE, EnsembleRows, RowInputs, is_whole
from privmix.laboratory.evaluation.text import EvaluationText
from privmix.training.manifest import Adapter

ROWS, OUTCOMES = "rows", "outcomes"
# The maximum number of protocols in a task: enough to share the distributions, few enough to distribute and resume.
_PROTOCOLS_AT_ONCE = 16
# The maximum number of models in a task: enough to share the public pass, few enough to distribute and resume.
_MODELS_AT_ONCE = 8
# The disk space in bytes that must stay free beside the rows.
_SPARE = 2**30


@dataclass(frozen=True)
class _Model:
    """Holds a model's name for the display, its base model and its adapter."""

    name: str
    base: Path
    adapter: AdapterFiles


class Workbench:
    """Computes missing results on Ray. Methods enter a connection into their argument `cluster` when they need one."""

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

    def files(self, ensemble: TrainedEnsemble, adapters: Sequence[Adapter]) -> EnsembleRows:
        """Returns the files with the rows of an ensemble's base model and of these of its models."""
        paths = (self._path(ensemble.manifest.base_revision, ensemble, adapter) for adapter in adapters)
        return replace(self.base_files(ensemble), models=tuple(paths))

    @property
    def public_files(self) -> EnsembleRows:
        """The files with the rows of the public model, without any other."""
        return EnsembleRows(self._head(self._revision), self._path(self._revision), ())

    def base_files(self, ensemble: TrainedEnsemble) -> EnsembleRows:
        """Returns the files with the rows of the base model of an ensemble, which is also the only other model."""
        revision, public = ensemble.manifest.base_revision, self.public_files
        own = self._path(revision)
        original = None if revision == self._revision else (public.head, public.public)
        return EnsembleRows(self._head(revision), own, (own,), original=original)

    def compute_rows(self, ensembles: Iterable[tuple[TrainedEnsemble, Sequence[Adapter]]], cluster: ExitStack) -> None:
        """Computes the hidden states of base models and of models that are missing, and removes all others.

        Args:
            ensembles: with the models of each that are needed.

        Raises:
            InputError: the disk has no room for them.
            WorkError: a task failed.
        """
        self._rows.mkdir(mode=0o700, parents=True, exist_ok=True)
        bases, wanted = {self._revision: self._base}, {}
        for ensemble, adapters in ensembles:
            bases.setdefault(ensemble.manifest.base_revision, ensemble.base)
            for path, adapter in zip(self.files(ensemble, adapters).models, adapters, strict=True):
                name = f"{ensemble.directory.name}/{adapter.name}"
                wanted[path] = _Model(name, ensemble.base, ensemble.files(adapter))
        kept = {path for revision in bases for path in (self._head(revision), self._path(revision))}
        for path in set(self._rows.iterdir()) - kept - set(wanted):
            path.unlink()  # rows of another text or ensemble are private and useless here
        missing = [path for path in wanted if not is_whole(path, self.text.positions)]
        missing_bases = [revision for revision in bases if not is_whole(self._path(revision), self.text.positions)]
        if not missing and not missing_bases:
            return
        self._check_room(len(missing) + len(missing_bases))
        cluster.enter_context(connected())
        self._display.say(f"evaluating {len(missing) + len(missing_bases)} models on the held-out text")
        text = ray.put(self.text)
        for revision in missing_bases:
            name = "public model" if revision == self._revision else f"private base {revision[:12]}"
            arguments = bases[revision], text, self._precision, self._head(revision), self._path(revision)
            self._score(tasks.score_public, {name: arguments})
        size = min(_MODELS_AT_ONCE, -(-len(missing) // int(ray.cluster_resources().get("CPU", 1))))
        jobs = {}
        for group in _groups([(path, wanted[path]) for path in missing], size):
            files = [(model.adapter, path) for path, model in group]
            models = [model for _, model in group]
            name = " to ".join(dict.fromkeys((models[0].name, models[-1].name)))
            jobs[name] = models[0].base, files, text, self._precision
        self._score(tasks.score, jobs)

    def _score(self, function: Callable[..., None], jobs: Mapping[str, Sequence[Any]]) -> None:
        for _ in run_as_ray_tasks(function, jobs, self._display, gpus=True):
            pass

    def compute_outcomes(self, wanted: Iterable[tuple[int, PlannedCase]], cluster: ExitStack) -> None:
        """Computes the missing outcomes of protocols over runs.

        Raises:
            WorkError: a task failed.
        """
        missing = ((run, planned) for run, planned in wanted if self.outcomes.get(planned, run) is None)
        jobs = grouped(missing, _PROTOCOLS_AT_ONCE)
        if not jobs:
            return
        cluster.enter_context(connected())
        protocols = {id(planned) for _, group in jobs.values() for planned in group}
        self._display.say(f"evaluating {len(protocols)} protocols over {len(self.text.runs)} runs")
        arguments = {
            name: (
                [(planned.case.settings, planned.protocol) for planned in group],
                group[0].files,
                self.text.runs[run],
                self.text.true_tokens[self.text.runs[run]],
                self.text.contexts[self.text.runs[run]],
            )
            for name, (run, group) in jobs.items()
        }
        for name, outcomes in run_as_ray_tasks(tasks.trials, arguments, self._display):
            run, group = jobs[name]
            for planned, outcome in zip(group, outcomes, strict=True):
                self.outcomes.put(planned, run, outcome)

    def _path(
        self,
        revision: str,
        ensemble: TrainedEnsemble | None = None,
        adapter: Adapter | None = None,
    ) -> Path:
        origin = RowInputs(
            base=revision,
            adapter=None if adapter is None else adapter.sha256,
            part_kind=None if ensemble is None else ensemble.manifest.part_kind,
            text=self.text.digest,
            precision=self._precision,
        )
        return self._rows / origin.file

    def _head(self, revision: str) -> Path:
        return self._path(revision).with_suffix(".safetensors")

    def _check_room(self, models: int) -> None:
        size = models * self.text.positions * _hidden_size(self._base) * HIDDEN_TYPE().itemsize
        free = shutil.disk_usage(self._rows).free
        if size + _SPARE > free:
            raise InputError(
                f"output {self._rows.parent}: the hidden states of the models need {size / 2**30:.1f} GiB, but "
                f"only {free / 2**30:.1f} GiB are free; free disk space, evaluate fewer runs or tokens"
            )


def _groups(models: Sequence[tuple[Path, _Model]], size: int) -> Iterator[list[tuple[Path, _Model]]]:
    """Yields groups of up to `size` models of one base."""
    for _, on_base in groupby(models, key=lambda each: each[1].base):
        of_base = list(on_base)
        for first in range(0, len(of_base), max(1, size)):
            yield of_base[first : first + size]


def _hidden_size(base: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(base).get_text_config().hidden_size)
