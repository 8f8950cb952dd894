"""Measures what texts are worth for a task: trains classifiers of a label on them and tests on held-out real text.

This is "train on synthetic, test on real" (Esteban, Hyland, Rätsch 2017). The result is measured on private text: it is
for the operator only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from privmix.foundation.errors import InputError
from privmix.foundation.progress import Display
from privmix.laboratory.generation.quality import Likeness, variety
from privmix.laboratory.utility.classifiers import CLASSIFIERS, Examples, Score, Scores, evaluate
from privmix.laboratory.utility.copies import CopiedSpans, PlantedSecret, Secrets, find_secrets, longest_spans
from privmix.laboratory.utility.embedding import Embedder
from privmix.laboratory.utility.labelled import Labelled, TextOrigin
from privmix.privacy.arrays import Integers, Reals

REAL, HELD_OUT = "real text", "held-out real text"


@dataclass(frozen=True)
class TaskOptions:
    """Holds the options of a measurement.

    Attributes:
        seeds: the number of repetitions, each with other training texts and held-out users.
        most: the largest number of texts of a set that are embedded, drawn once. A repetition trains on as many, drawn
            from them with replacement.
    """

    seeds: int = 20
    most: int = 1000

    def __post_init__(self) -> None:
        for name, least in (("seeds", 2), ("most", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name}: must be at least {least}, not {getattr(self, name)}")


@dataclass(frozen=True)
class UtilityRow:
    """Holds the measurements of one training set.

    Attributes:
        texts: the number of texts whose label is one of the real text's.
        missing: the classes of the held-out text that the set lacks; a classifier cannot answer them.
        unknown: the number of texts with another label, which are left out.
        dropped: the number of lines without a text, and of cut records.
        scores: by the name of the classifier.
        over_first: the accuracy less that of the first training set, by the name of the classifier, with an interval of
            the difference; None for the real text and the first set.
        mauve: of the texts and the held-out ones; None with too few of either (`quality.Likeness`).
        distinct: distinct-n by n, in the same number of words of every set.
        copies: from the real training text. For the real text itself: what held-out people copy from it, by chance.
    """

    name: str
    origin: TextOrigin
    texts: int
    missing: tuple[str, ...]
    unknown: int
    dropped: int
    scores: Mapping[str, Scores]
    over_first: Mapping[str, Score] | None
    mauve: float | None
    distinct: Mapping[int, float]
    copies: CopiedSpans
    secrets: Secrets | None


@dataclass(frozen=True)
class TaskReport:
    """Holds all rows, the real text's first.

    Attributes:
        majority: the accuracy of answering the most frequent class of the held-out text.
        words: the number of words of each set that distinct-n counts.
        mauve_texts: how many texts of each set MAUVE compares; None if no set has enough.
    """

    rows: tuple[UtilityRow, ...]
    label_field: str
    classes: tuple[str, ...]
    held_out: int
    held_out_users: int
    majority: float
    words: int
    mauve_texts: int | None
    options: TaskOptions
    model: str

    def record(self) -> dict[str, Any]:
        """Returns the report as JSON output."""
        return asdict(self)


def measure(
    real: Labelled,
    held_out: Labelled,
    sets: Sequence[Labelled],
    *,
    label_field: str,
    model: Path,
    options: TaskOptions,
    canaries: Sequence[PlantedSecret] = (),
    display: Display | None = None,
) -> TaskReport:
    """Measures the real text and each set.

    Args:
        real: the private text that the sets were made from.
        held_out: real text of other people.
        model: the directory of the public model, for embeddings and tokens.

    Raises:
        InputError: the real texts have fewer than two classes, or a set has no text of their classes.
    """
    classes = tuple(sorted(real.classes | held_out.classes))
    if len(held_out.classes) < 2:
        raise InputError(f"held-out: has only the class {min(held_out.classes)!r} in {label_field}; a task needs two")
    trained = [_known(labelled, frozenset(classes)) for labelled in (real, *sets)]
    embedder, display = Embedder(model), display or Display()
    drawn = [labelled.sample(options.most) for labelled in trained]
    embedded = _embed(embedder, [held_out, *drawn], display)
    display.say("Training the classifiers and searching for copies")
    varieties = variety({labelled.name: labelled.texts for labelled in trained})
    named = {labelled.name: features for labelled, features in zip(trained, embedded[1:], strict=True)}
    likeness = Likeness.of(named, embedded[0])
    tokens = {labelled.name: list(map(embedder.tokens, labelled.texts)) for labelled in (held_out, *trained)}
    tested = _examples(held_out, embedded[0], classes)
    rows: list[UtilityRow] = []
    for whole, labelled, sample, features in zip((real, *sets), trained, drawn, embedded[1:], strict=True):
        examples = _examples(sample, features, classes)
        compared = tokens[HELD_OUT if labelled is trained[0] else labelled.name]
        scores = {
            name: evaluate(examples, tested, classify, seeds=options.seeds) for name, classify in CLASSIFIERS.items()
        }
        first = rows[1] if len(rows) > 1 else None
        rows.append(
            UtilityRow(
                labelled.name,
                labelled.origin,
                len(labelled),
                tuple(sorted(held_out.classes - labelled.classes)),
                len(whole) - len(labelled),
                labelled.dropped,
                scores,
                {name: own.over(first.scores[name]) for name, own in scores.items()} if first else None,
                likeness.scores.get(labelled.name),
                varieties[labelled.name].distinct,
                CopiedSpans.of(longest_spans(compared, tokens[REAL])),
                find_secrets(labelled.texts, canaries) if canaries else None,
            )
        )
        display.say(f"{labelled.name}: measured")
    counts = [held_out.labels.count(label) for label in held_out.classes]
    return TaskReport(
        tuple(rows),
        label_field,
        classes,
        len(held_out),
        len(set(held_out.users)),
        max(counts) / len(held_out),
        varieties[REAL].words,
        likeness.texts,
        options,
        model.name,
    )


def _known(labelled: Labelled, classes: frozenset[str]) -> Labelled:
    """Returns the texts whose label the real text has."""
    if not labelled.classes & classes:
        raise InputError(f"train {labelled.name}: no text has a label of the real text; see --label-field")
    return labelled.only(classes)


def _embed(embedder: Embedder, sets: Sequence[Labelled], display: Display) -> list[Reals]:
    done = dict.fromkeys((f"embedding {labelled.name}" for labelled in sets), 0.0)

    def show(name: str, fraction: float) -> None:
        done[name] = fraction
        display.show(done)

    return [embedder.embed(labelled.texts, partial(show, f"embedding {labelled.name}")) for labelled in sets]


def _examples(labelled: Labelled, rows: Reals, classes: Sequence[str]) -> Examples:
    return Examples(rows, _numbers(labelled.labels, classes), _numbers(labelled.users, sorted(set(labelled.users))))


def _numbers(values: Sequence[str], known: Sequence[str]) -> Integers:
    number = {value: index for index, value in enumerate(known)}
    return np.array([number[value] for value in values], dtype=np.int64)
