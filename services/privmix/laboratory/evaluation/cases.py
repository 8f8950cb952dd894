"""Stores the outcome of each run of a case, so that it is computed only once."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from privmix.foundation.files import write_atomically
from privmix.laboratory.evaluation.rows import EnsembleRows
from privmix.laboratory.evaluation.text import EvaluationText
from privmix.laboratory.evaluation.trial import TrialResult
from privmix.privacy.protocol import Protocol
from privmix.privacy.settings import Settings

_FORMAT = 5
_STORED = TypeAdapter(TrialResult)


@dataclass(frozen=True)
class Case:
    """Holds settings to evaluate, their protocol, the name of the ensemble, and the files with its models' rows."""

    ensemble: str
    settings: Settings
    protocol: Protocol
    files: EnsembleRows


class Outcomes:
    """Stores the outcomes of single runs in a directory."""

    def __init__(self, directory: Path, text: EvaluationText) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._text = text

    def get(self, case: Case, run: int) -> TrialResult | None:
        try:
            return _STORED.validate_json(self._path(case, run).read_bytes())
        except (OSError, ValidationError):
            return None

    def put(self, case: Case, run: int, outcome: TrialResult) -> None:
        write_atomically(self._path(case, run), json.dumps(asdict(outcome)).encode())

    def all(self, case: Case) -> list[TrialResult]:
        """Returns the outcomes of all runs, without missing ones."""
        stored = [self.get(case, run) for run in range(len(self._text.runs))]
        return [outcome for outcome in stored if outcome is not None]

    def _path(self, case: Case, run: int) -> Path:
        content = [
            _FORMAT,
            case.settings.model_dump(mode="json"),
            [event.to_json() for event in case.settings.spent_before],
            [path.name for path in (case.files.public, *case.files.models)],
            hashlib.sha256(self._text.runs[run].tobytes()).hexdigest(),
        ]
        return self._directory / f"{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]}.json"
