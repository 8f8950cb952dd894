"""Measures what synthetic pairs of a dialogue and its note teach a model that writes notes.

    python -m tests.benchmarks.labelled notes --source DIALOGUES.csv --held-out OTHERS.csv --output pairs
    python -m tests.benchmarks.notes --schema > note.json
    privmix generate --config dpsgd.yaml --schema note.json --label "chief complaint=8" --max-tokens 256 --output made
    python -m tests.benchmarks.notes pairs/train.jsonl --held-out pairs/heldout.jsonl --train DP-SGD=made

A model is trained on `--texts` pairs of each set, and on as many real ones. It then reads the label and dialogue of
each held-out patient. For each model:

- `gain`: what a token of the clinician's note gains over the public model, in nats, with the 95 % interval over
  patients.
- `over_real`: that gain less the one of the real pairs.
- `own_dialogue`: what a token of the note loses when the model reads another patient's dialogue. A model that writes
  notes without reading has 0.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from privmix.foundation.json_lines import load_lines
from privmix.foundation.progress import Display
from privmix.generation.job import load_output
from privmix.generation.template import DEFAULT
from privmix.laboratory.audit.attacks.released_text import ReleasedTexts, train_on
from privmix.laboratory.audit.worlds.models import LocalModels
from privmix.laboratory.evaluation.estimate import Estimate
from privmix.training.options import TrainingOptions
from privmix.training.public_model import resolve
from tests.benchmarks.options import OutputOption, show

TRAINING = TrainingOptions(block=256, epochs=2)
REAL, PUBLIC = "real pairs", "public model"
LONGEST_DIALOGUE, LONGEST_NOTE = 400, 200
"""The most characters of a dialogue and of a note."""


@dataclass(frozen=True)
class Consultation:
    """What a patient and a doctor said, and what the clinician wrote."""

    dialogue: str
    note: str

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Reads the JSON of `text`, whatever its spaces."""
        return cls(**json.loads(text))

    def text(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    def divided(self) -> tuple[str, str]:
        """Returns the text up to the first character of the note, and the rest."""
        note = json.dumps(self.note, ensure_ascii=False)[1:]
        whole = self.text()
        return whole[: -len(note) - 1], note + "}"


SCHEMA = {
    "type": "object",
    "properties": {
        "dialogue": {"type": "string", "minLength": 1, "maxLength": LONGEST_DIALOGUE},
        "note": {"type": "string", "minLength": 1, "maxLength": LONGEST_NOTE},
    },
    "required": ["dialogue", "note"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Losses:
    """The losses of one held-out patient's note, in nats, by model: the public one first.

    Attributes:
        own: after the patient's own dialogue.
        other: after another patient's.
        tokens: of the note.
    """

    own: Sequence[float]
    other: Sequence[float]
    tokens: int


def document(label: str, text: str) -> str:
    """Returns the text after its label, in the form of the prompts of `privmix generate --label`."""
    return f"{DEFAULT.format(label=label)} {text}"


def measured(models: LocalModels, rows: Sequence[Mapping[str, Any]]) -> list[Losses]:
    """Returns the losses of each held-out note, after its own dialogue and after that of the patient before."""
    read = [Consultation.of_text(row["text"]) for row in rows]
    found = []
    for number, (row, consultation) in enumerate(zip(rows, read, strict=True)):
        _, note = consultation.divided()
        losses = []
        for dialogue in (consultation.dialogue, read[number - 1].dialogue):
            prompt, _ = Consultation(dialogue, consultation.note).divided()
            output = models.continuations(document(row["label"], prompt), [note], 1)
            losses.append([-float(each.sum()) for each in output.of_wanted])
        own, other = losses
        found.append(Losses(own, other, len(output.wanted)))
    return found


def compared(names: Sequence[str], losses: Sequence[Losses]) -> dict[str, dict[str, list[float | None]]]:
    """Returns the figures of each model, the public one first."""
    tokens = [each.tokens for each in losses]

    def estimated(sums: Iterable[float]) -> list[float | None]:
        estimate = Estimate.of_ratio(list(sums), tokens)
        return [None if each is None else round(each, 4) for each in (estimate.mean, estimate.low, estimate.high)]

    real = names.index(REAL)
    return {
        name: {
            "gain": estimated(each.own[0] - each.own[number] for each in losses),
            "over_real": estimated(each.own[real] - each.own[number] for each in losses),
            "own_dialogue": estimated(each.other[number] - each.own[number] for each in losses),
        }
        for number, name in enumerate(names)
    }


def benchmark(
    real: Annotated[Path | None, typer.Argument(help="The real pairs that `labelled notes` wrote.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="Those of other patients, to test on.")] = None,
    train: Annotated[list[str] | None, typer.Option(help="NAME=JOB: records of `privmix generate --schema`.")] = None,
    texts: Annotated[int, typer.Option(min=1, help="The pairs of each set to train on.")] = 160,
    output: OutputOption = Path("notes"),
    schema: Annotated[bool, typer.Option("--schema", help="Print the records' schema alone.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Four pairs of each set, two patients.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compares models that were trained on real and on synthetic pairs."""
    if schema:
        print(json.dumps(SCHEMA, indent=1))
        return
    if real is None or held_out is None:
        raise typer.BadParameter("give the real pairs and --held-out, which `labelled notes` writes")
    texts, patients = (4, 2) if quick else (texts, None)
    jobs = {name: Path(job) for name, _, job in (each.partition("=") for each in train or ())}
    sets = {REAL: load_lines(real)} | {name: load_output(job) for name, job in jobs.items()}
    models, counts = [], {}
    for number, (name, rows) in enumerate(sets.items()):
        chosen = random.Random(0).sample(rows, min(texts, len(rows)))
        counts[name] = len(chosen)
        pairs = (document(row["label"], Consultation.of_text(row["text"]).text()) for row in chosen)
        models.append(train_on(ReleasedTexts(name, tuple(pairs)), output / str(number), Display(), TRAINING))
    local = LocalModels(resolve(), [each.files(each.manifest.parts[0]) for each in models])
    tested = load_lines(held_out)[:patients]
    figures = compared([PUBLIC, *sets], measured(local, tested))
    show({"patients": len(tested), "pairs": counts, "models": figures}, as_json)


if __name__ == "__main__":
    typer.run(benchmark)
