"""Describes the protocols to evaluate and stores the outcome of each run on disk, so that it is computed only once."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from privmix.foundation.files import write_atomically
from privmix.laboratory.evaluation.rows import EnsembleRows
from privmix.laboratory.evaluation.text import EvaluationText
from privmix.laboratory.evaluation.trial import TrialResult
from privmix.privacy.protocol import Protocol
from privmix.privacy.settings import Settings

_FORMAT = 3


@dataclass(frozen=True)
class Case:
    """Names settings to evaluate on an ensemble."""

    ensemble: Path
    settings: Settings


@dataclass(frozen=True)
class PlannedCase:
    """Holds a case, its protocol, and the files with its models' rows."""

    case: Case
    protocol: Protocol
    files: EnsembleRows


class Outcomes:
    """Stores the outcomes of single runs in a directory."""

    def __init__(self, directory: Path, text: EvaluationText) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._text = text

    def get(self, planned: PlannedCase, run: int) -> TrialResult | None:
        try:
            stored = TrialResult(**json.loads(self._path(planned, run).read_bytes()))
            contexts, windows = (
                tuple((count, loss) for count, loss in sums) for sums in (stored.contexts, stored.windows)
            )
            return replace(stored, contexts=contexts, windows=windows)
        except (OSError, ValueError, TypeError):
            return None

    def put(self, planned: PlannedCase, run: int, outcome: TrialResult) -> None:
        write_atomically(self._path(planned, run), json.dumps(asdict(outcome)).encode())

    def first(self, planned: PlannedCase, runs: int) -> list[TrialResult]:
        """Returns the outcomes of the first `runs` runs, without missing ones."""
        stored = [self.get(planned, run) for run in range(runs)]
        return [outcome for outcome in stored if outcome is not None]

    def _path(self, planned: PlannedCase, run: int) -> Path:
        content = [
            _FORMAT,
            planned.case.settings.model_dump(mode="json"),
            [event.to_json() for event in planned.case.settings.spent_before],
            [path.name for path in (planned.files.public, *planned.files.models)],
            hashlib.sha256(self._text.runs[run].tobytes()).hexdigest(),
        ]
        return self._directory / f"{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]}.json"


def grouped(missing: Iterator[tuple[int, PlannedCase]], size: int) -> Mapping[str, tuple[int, list[PlannedCase]]]:
    """Groups protocols that read the same rows of the same run into named tasks of up to `size` protocols."""
    by_rows: dict[tuple[int, EnsembleRows], list[PlannedCase]] = {}
    for run, planned in missing:
        by_rows.setdefault((run, planned.files), []).append(planned)
    tasks: dict[str, tuple[int, list[PlannedCase]]] = {}
    for (run, _), group in by_rows.items():
        for start in range(0, len(group), size):
            tasks[f"run {run + 1}, {len(tasks) + 1}"] = run, group[start : start + size]
    return tasks
