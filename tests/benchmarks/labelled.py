"""Makes labelled corpora of public text, for `privmix train`, `generate --label` and `evaluate task`.

    python -m tests.benchmarks.labelled commits --source COMMITS.jsonl --output FOLDER

Prints their size, and how well real text teaches each label: what synthetic text can reach at most.

- demo: the reason for the call.
- speeches (tiny Shakespeare, in its order): the play, for the first eight of the nine.
- commits (messages of the git project): the area before the colon of the subject, which is removed from the text.
- dialogues (MTS-Dialog, Ben Abacha et al., EACL 2023): the section of the clinician's note. `--held-out` is its
  validation file.
- notes: the same; a text is a record of the dialogue and the note, in the form of `tests.benchmarks.notes`.

A document is the text after its label, in the form of the prompts of `privmix generate --label`.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from privmix.foundation.json_lines import load_lines, write_lines
from privmix.laboratory.utility.labelled import read
from privmix.laboratory.utility.task import HELD_OUT as HELD_OUT_NAME
from privmix.laboratory.utility.task import REAL, TaskOptions, measure
from privmix.training.demo import HELD_OUT, TRAIN, write_demo_corpus
from privmix.training.public_model import resolve
from privmix.training.split import held_out as is_held_out
from tests.benchmarks.notes import LONGEST_DIALOGUE, LONGEST_NOTE, Consultation, document
from tests.benchmarks.options import OutputOption

LABEL, TEXT, DOCUMENT = "label", "text", "document"

_LONGEST = 240  # characters of a text
_SHORTEST = 40
_HELD_OUT = 0.2  # of the users

# The first words of each play, in the order of the file.
_PLAYS = {
    "Before we proceed any further": "Coriolanus",
    "Now is the winter of our discontent": "Richard III",
    "Old John of Gaunt": "Richard II",
    "Gregory, o' my word": "Romeo and Juliet",
    "I wonder how the king escaped": "Henry VI",
    "If you shall chance, Camillo": "The Winter's Tale",
    "Escalus.": "Measure for Measure",
    "I'll pheeze you": "The Taming of the Shrew",
    "Boatswain!": None,
}

_AREAS = {
    "documentation": r"docs?|documentation(/.*)?|man",
    "web": r"gitweb",
    "gui": r"git-gui|gitk(-git)?",
    "foreign": r"git-svn|git-p4|(git-)?cvs\w*|git-archimport|fast-(im|ex)port|remote-(hg|bzr|helpers)",
    "mail": r"(git-)?(send-email|am|imap-send)|format-patch|mailinfo",
    "completion": r"completion|bash( completion)?|git-completion",
    "build": r"makefile|build|configure|mingw|cmake|ci|meson|config\.mak\.\w+",
    "tests": r"t|t/.*|t\d{4}.*|tests?|test-lib(-functions)?|perf",
}

# What the section headers of MTS-Dialog stand for.
_SECTIONS = {
    "FAM/SOCHX": "family and social history",
    "GENHX": "history of present illness",
    "PASTMEDICALHX": "past medical history",
    "CC": "chief complaint",
    "PASTSURGICAL": "past surgical history",
    "ALLERGY": "allergies",
    "ROS": "review of systems",
    "MEDICATIONS": "medications",
    "ASSESSMENT": "assessment",
    "EXAM": "physical exam",
    "DIAGNOSIS": "diagnosis",
    "DISPOSITION": "disposition",
    "PLAN": "plan",
    "EDCOURSE": "emergency department course",
    "IMMUNIZATIONS": "immunizations",
    "IMAGING": "imaging",
    "GYNHX": "gynecologic history",
    "PROCEDURES": "procedures",
    "OTHER_HISTORY": "other history",
    "LABS": "labs",
}
_SUBJECT = re.compile(r"([\w./\-]+(?: [\w\-]+)?): ")


class LabelledKind(StrEnum):
    DEMO, SPEECHES, COMMITS, DIALOGUES, NOTES = "demo", "speeches", "commits", "dialogues", "notes"


@dataclass(frozen=True)
class LabelledText:
    user: str
    label: str
    text: str

    def record(self) -> dict[str, Any]:
        written = document(self.label, self.text)
        return {"user": self.user, LABEL: self.label, TEXT: self.text, DOCUMENT: written}


def write_labelled(
    kind: LabelledKind, folder: Path, source: Path | None = None, held_out: Path | None = None, *, users: int = 0
) -> tuple[Path, Path]:
    """Writes the texts to train on and those of held-out users; returns both files.

    Args:
        source: the file of the texts; not of the demo.
        held_out: one of other users; by default a fifth of the users are held out.
        users: of the demo corpus, which has its own held-out users.

    Raises:
        typer.BadParameter: there is no source.
    """
    files = folder / TRAIN, folder / HELD_OUT
    if kind is LabelledKind.DEMO:
        corpus = folder / "corpus"
        write_demo_corpus(corpus, users=users)
        sides = [list(map(_call, load_lines(corpus / file.name))) for file in files]
    elif source is None:
        raise typer.BadParameter(f"source: {kind} are read from a file; give it")
    elif held_out is not None:
        sides = [list(_READERS[kind](file)) for file in (source, held_out)]
    else:
        texts = list(_READERS[kind](source))
        sides = [
            [text for text in texts if is_held_out(text.user, bytes(32), _HELD_OUT) is side] for side in (False, True)
        ]
    for file, side in zip(files, sides, strict=True):
        write_lines(file, (text.record() for text in side))
    return files


def speeches(file: Path) -> Iterator[LabelledText]:
    """Yields the speeches of eight plays that are not too short."""
    play = None
    for row in load_lines(file):
        play = next((name for words, name in _PLAYS.items() if row["text"].startswith(words)), play)
        if play is not None and len(row["text"]) >= _SHORTEST:
            yield LabelledText(row["user"], play, _cut(row["text"]))


def commits(file: Path) -> Iterator[LabelledText]:
    """Yields the messages whose subject names one of eight areas, without that name."""
    for row in load_lines(file):
        if (subject := _SUBJECT.match(row["text"])) and (area := _area(subject[1].lower())):
            yield LabelledText(row["user"], area, _cut(row["text"][subject.end() :]))


def dialogues(file: Path) -> Iterator[LabelledText]:
    """Yields the dialogues of a CSV file, each of another patient."""
    for row in _consultations(file):
        yield LabelledText(row["ID"], _SECTIONS[row["section_header"]], _dialogue(row))


def notes(file: Path) -> Iterator[LabelledText]:
    """Yields the dialogues of a CSV file with the clinicians' notes, as JSON."""
    for row in _consultations(file):
        note = _cut(" ".join(row["section_text"].split()), LONGEST_NOTE)
        record = Consultation(_dialogue(row), note).text()
        yield LabelledText(row["ID"], _SECTIONS[row["section_header"]], record)


_READERS: Mapping[LabelledKind, Callable[[Path], Iterator[LabelledText]]] = {
    LabelledKind.SPEECHES: speeches,
    LabelledKind.COMMITS: commits,
    LabelledKind.DIALOGUES: dialogues,
    LabelledKind.NOTES: notes,
}


def _consultations(file: Path) -> Iterator[Mapping[str, str]]:
    with file.open(newline="") as rows:
        yield from csv.DictReader(rows)


def _dialogue(row: Mapping[str, str]) -> str:
    return _cut("\n".join(line.strip() for line in row["dialogue"].splitlines()), LONGEST_DIALOGUE)


def _call(row: Mapping[str, Any]) -> LabelledText:
    return LabelledText(row["user"], row["reason"], row["text"])


def _area(name: str) -> str | None:
    return next((area for area, pattern in _AREAS.items() if re.fullmatch(pattern, name)), None)


def _cut(text: str, longest: int = _LONGEST) -> str:
    text = text.strip()
    return text if len(text) <= longest else text[:longest].rsplit(None, 1)[0]


def benchmark(
    kind: Annotated[LabelledKind, typer.Argument(help="Which corpus.")] = LabelledKind.DEMO,
    output: OutputOption = Path("labelled"),
    source: Annotated[
        Path | None, typer.Option(help="JSON Lines with user and text; CSV of dialogues and notes; not of the demo.")
    ] = None,
    held_out: Annotated[Path | None, typer.Option(help="Text of other users; by default a fifth is held out.")] = None,
    users: Annotated[int, typer.Option(min=10, help="People of the demo corpus.")] = 1640,
    quick: Annotated[bool, typer.Option("--quick", help="A small demo corpus, two repetitions.")] = False,
) -> None:
    """Writes a labelled corpus, and prints its size and the scores of its real text."""
    options = TaskOptions(seeds=2) if quick else TaskOptions()
    output.mkdir(parents=True, exist_ok=True)
    train, tests = write_labelled(kind, output, source, held_out, users=60 if quick else users)
    real, tested = read(REAL, train, TEXT, LABEL), read(HELD_OUT_NAME, tests, TEXT, LABEL)
    report = measure(real, tested, [], label_field=LABEL, model=resolve(), options=options)
    record = {
        side: {"texts": len(texts), "users": len(set(texts.users))}
        for side, texts in (("train", real), ("held out", tested))
    }
    scores = {name: asdict(score) for name, score in report.rows[0].scores.items()}
    print(json.dumps({**record, "classes": len(report.classes), "majority": report.majority, "scores": scores}))


if __name__ == "__main__":
    typer.run(benchmark)
