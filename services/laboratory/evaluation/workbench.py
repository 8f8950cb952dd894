"""Computes and stores the rows of models and the outcomes of protocols over one text, each only once."""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import ray

from services.engine.engine import AdapterFiles
from services.errors import InputError
from services.fan_out import spread
from services.laboratory.evaluation import tasks
from services.laboratory.evaluation.cases import Outcomes, Planned, grouped
from services.laboratory.evaluation.ensembles import Ensemble
from services.laboratory.evaluation.rows import HIDDEN_TYPE, Drawing, EnsembleRows, Origin, is_whole
from services.laboratory.evaluation.scoring import Precision
from services.laboratory.evaluation.text import Positions, Text
from services.progress import Display
from services.ray_session import connected
from services.training.manifest import Adapter

ROWS, OUTCOMES = "rows", "outcomes"
# The maximum number of protocols in a task: enough to share the distributions, few enough to distribute and resume.
_PROTOCOLS_AT_ONCE = 16
# The maximum number of models in a task: enough to share the public pass, few enough to distribute and resume.
_MODELS_AT_ONCE = 8
# The same for models with a row at some positions only.
_DRAWN_MODELS_AT_ONCE = 32
# The disk space in bytes that must stay free beside the rows.
_SPARE = 2**30


@dataclass(frozen=True)
class _Model:
    """Holds a model's name for the display, its adapter, and the positions of its rows."""

    name: str
    adapter: AdapterFiles
    positions: Positions


class Workbench:
    """Computes missing results on Ray. Methods enter a connection into their argument `cluster` when they need one."""

    def __init__(
        self, base: Path, revision: str, text: Text, output: Path, precision: Precision, display: Display
    ) -> None:
        """Initializes the workbench for the public model in `base` with its `revision`."""
        self.text = text
        self.outcomes = Outcomes(output / OUTCOMES, text)
        self._base = base
        self._revision = revision
        self._rows = output / ROWS
        self._precision = precision
        self._display = display

    def files(self, ensemble: Ensemble, adapters: Sequence[Adapter], drawn: int | None = None) -> EnsembleRows:
        """Returns the files with the rows of the public model and of these models of an ensemble.

        Args:
            drawn: the number of models with a row at each position (`rows.Drawing`); all unless given.
        """
        return self._files(ensemble, adapters, self._drawing(adapters, drawn))

    def _files(self, ensemble: Ensemble, adapters: Sequence[Adapter], drawing: Drawing | None) -> EnsembleRows:
        paths = (
            self._path(ensemble, adapter, None if drawing is None else drawing.of_model(number))
            for number, adapter in enumerate(adapters)
        )
        return EnsembleRows(self._head, self._path(), tuple(paths), None if drawing is None else drawing.drawn)

    def _drawing(self, adapters: Sequence[Adapter], drawn: int | None) -> Drawing | None:
        few = drawn is not None and drawn < len(adapters)
        return _drawn(self.text.positions, len(adapters), drawn) if few else None

    def compute_rows(
        self, ensembles: Iterable[tuple[Ensemble, Sequence[Adapter]]], cluster: ExitStack, drawn: int | None = None
    ) -> None:
        """Computes the hidden states of the public model and of models that are missing, and removes all others.

        Args:
            ensembles: with the models of each that are needed.
            drawn: see `files`.

        Raises:
            InputError: the disk has no room for them.
            WorkError: a task failed.
        """
        self._rows.mkdir(mode=0o700, parents=True, exist_ok=True)
        public = self._path()
        everywhere = np.arange(self.text.positions)
        wanted = {}
        for ensemble, adapters in ensembles:
            drawing = self._drawing(adapters, drawn)
            paths = self._files(ensemble, adapters, drawing).models
            for number, (path, adapter) in enumerate(zip(paths, adapters, strict=True)):
                positions = everywhere if drawing is None else drawing.positions(number)
                wanted[path] = _Model(f"{ensemble.directory.name}/{adapter.name}", ensemble.files(adapter), positions)
        for path in set(self._rows.iterdir()) - {self._head, public, *wanted}:
            path.unlink()  # rows of another text or ensemble are private and useless here
        missing = [path for path, model in wanted.items() if not is_whole(path, len(model.positions))]
        public_missing = not is_whole(public, self.text.positions)
        if not missing and not public_missing:
            return
        self._check_room(sum(len(wanted[path].positions) for path in missing) + public_missing * self.text.positions)
        cluster.enter_context(connected())
        self._display.say(f"evaluating {len(missing) + public_missing} models on the held-out text")
        text = ray.put(self.text)
        if public_missing:
            arguments = self._base, text, self._precision, self._head, public
            self._score(tasks.score_public, {"public model": arguments})
        at_once = _MODELS_AT_ONCE if drawn is None else _DRAWN_MODELS_AT_ONCE
        size = min(at_once, -(-len(missing) // int(ray.cluster_resources().get("CPU", 1))))
        jobs = {}
        for group in (missing[first : first + size] for first in range(0, len(missing), max(1, size))):
            files = [(wanted[path].adapter, path) for path in group]
            name = " to ".join(dict.fromkeys((wanted[group[0]].name, wanted[group[-1]].name)))
            jobs[name] = self._base, files, text, self._precision, [wanted[path].positions for path in group]
        self._score(tasks.score, jobs)

    def _score(self, function: Callable[..., None], jobs: Mapping[str, Sequence[Any]]) -> None:
        for _ in spread(function, jobs, self._display, gpus=True):
            pass

    def compute_outcomes(self, wanted: Iterable[tuple[int, Planned]], cluster: ExitStack) -> None:
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
            )
            for name, (run, group) in jobs.items()
        }
        for name, outcomes in spread(tasks.trials, arguments, self._display):
            run, group = jobs[name]
            for planned, outcome in zip(group, outcomes, strict=True):
                self.outcomes.put(planned, run, outcome)

    def _path(
        self, ensemble: Ensemble | None = None, adapter: Adapter | None = None, drawing: str | None = None
    ) -> Path:
        origin = Origin(
            base=self._revision,
            adapter=None if adapter is None else adapter.sha256,
            attention=None if ensemble is None else ensemble.manifest.attention,
            text=self.text.digest,
            precision=self._precision,
            drawing=drawing,
        )
        return self._rows / origin.file

    @property
    def _head(self) -> Path:
        return self._path().with_suffix(".safetensors")

    def _check_room(self, rows: int) -> None:
        size = rows * _hidden_size(self._base) * HIDDEN_TYPE().itemsize
        free = shutil.disk_usage(self._rows).free
        if size + _SPARE > free:
            raise InputError(
                f"output {self._rows.parent}: the hidden states of the models need {size / 2**30:.1f} GiB, but "
                f"only {free / 2**30:.1f} GiB are free; free disk space, evaluate fewer runs or tokens, or set --drawn"
            )


_drawn = lru_cache(maxsize=8)(Drawing)


def _hidden_size(base: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(base).get_text_config().hidden_size)
