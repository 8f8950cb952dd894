"""Reports the quality of a job's texts as JSON and as one self-contained HTML page.

The baseline is the public model's continuations of the same prompts. With the real text, the report has further rows
and columns, which are private. That page has another name and a warning.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from privmix.engine.engine import AdapterFiles
from privmix.foundation.errors import InputError
from privmix.foundation.files import write_atomically
from privmix.foundation.json_lines import read_lines
from privmix.generation.baseline import load_baseline
from privmix.generation.card import load_card
from privmix.generation.job import load_job, load_output
from privmix.generation.records import records_of
from privmix.laboratory import html_report
from privmix.laboratory.evaluation.figures import PALETTES, Theme
from privmix.laboratory.generation import quality
from privmix.laboratory.generation.fields import FieldReport, describe
from privmix.training.corpus import Corpus
from privmix.training.manifest import Manifest
from privmix.training.split import held_out

HTML_FILE, OPERATOR_HTML_FILE = "report.html", "report-operator.html"
RECORD_FILE, OPERATOR_RECORD_FILE = "report.json", "report-operator.json"
SYNTHETIC, BASELINE, REAL = "private synthetic", "public model", "real text"

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_TEST_SHARE = 0.3
_SALT = bytes(32)  # the split of the real text needs no secret, because it is not published


@dataclass(frozen=True)
class Real:
    """Holds the private text, divided by user: one part for the row of real text, the other for tests."""

    train: tuple[tuple[str, str | None], ...]
    test: tuple[tuple[str, str | None], ...]

    @classmethod
    def load(cls, path: Path, user_field: str, text_field: str, label_field: str | None) -> "Real":
        """Reads a corpus.

        Raises:
            InputError: the corpus is invalid, or has too few users to divide.
        """
        halves: dict[bool, list[tuple[str, str | None]]] = {False: [], True: []}
        labels = iter(_labels(path, label_field))
        for document in Corpus(path, user_field, text_field):
            label = next(labels) if label_field else None
            halves[held_out(document.user, _SALT, _TEST_SHARE)].append((document.text, label))
        if not all(halves.values()):
            raise InputError(f"real {path}: has too few users to train on some and test on others")
        return cls(tuple(halves[False]), tuple(halves[True]))


@dataclass(frozen=True)
class QualityRow:
    """Holds the measurements of one set of texts. Fields with a default depend on private text, without protection."""

    name: str
    texts: int
    lengths: quality.Lengths
    variety: quality.Variety
    perplexity: float
    finetuned_perplexity: float | None = None
    mauve: float | None = None
    utility: quality.Utility | None = None
    overlap: quality.PrivateTextOverlap | None = None


@dataclass(frozen=True)
class QualityReport:
    """Holds all rows, the model and the label with which they were measured, and the fields of a job's records.

    Attributes:
        mauve_texts: how many texts of each set MAUVE compares; None if no set has enough.
    """

    rows: tuple[QualityRow, ...]
    mauve_texts: int | None
    card: Mapping[str, Any]
    model: str
    label_field: str | None
    operator: bool
    fields: FieldReport | None = None

    def record(self) -> dict[str, Any]:
        """Returns the report as JSON output."""
        return asdict(self)


def make_report(
    directory: Path,
    model: Path,
    *,
    real: Real | None = None,
    finetuned: Path | None = None,
    label_field: str | None = None,
) -> tuple[QualityReport, Path]:
    """Measures a job's texts and its baseline, if there is one, writes the files, and returns the page's path.

    Args:
        model: the directory of the public model, which computes perplexities and features.
        real: the private text. With it, the report is for the operator only.
        finetuned: an ensemble of one part, for a second perplexity, which is private too.
        label_field: the field that the classifier predicts, in the job's texts and in the real text.

    Raises:
        InputError: there are no texts, or an argument does not match them.
    """
    load_job(directory)
    sets = {SYNTHETIC: _pairs(load_output(directory), label_field)}
    if (baseline := load_baseline(directory)) is not None:
        sets[BASELINE] = _pairs(baseline, label_field)
    if real is not None:
        sets[REAL] = real.train
    for name, pairs in sets.items():
        if not any(text.strip() for text, _ in pairs):
            raise InputError(f"{directory}: the {name} has no text")
    texts, reader = {name: _texts(pairs) for name, pairs in sets.items()}, quality.PerplexityModel(model)
    likeness = _likeness(texts, reader, real)
    report = QualityReport(
        _rows(sets, reader, likeness, real, _adapter(finetuned), label_field),
        likeness.texts,
        load_card(directory),
        model.name,
        label_field,
        operator=real is not None or finetuned is not None,
        fields=_fields(directory),
    )
    page, record = (OPERATOR_HTML_FILE, OPERATOR_RECORD_FILE) if report.operator else (HTML_FILE, RECORD_FILE)
    write_atomically(directory / record, json.dumps(report.record(), indent=2).encode() + b"\n")
    write_atomically(directory / page, render(report, texts).encode())
    return report, directory / page


def render(report: QualityReport, texts: Mapping[str, Sequence[str]]) -> str:
    """Renders the HTML page with embedded figures."""
    shown = {name: contents for name, contents in texts.items() if name != REAL}
    return html_report.render(
        _TEMPLATE,
        report=report,
        card=report.card,
        pictures={
            "lengths": {theme: html_report.picture(_lengths_figure(texts, theme)) for theme in PALETTES},
            "distinct": {theme: html_report.picture(_distinct_figure(report.rows, theme)) for theme in PALETTES},
        },
        # The page never shows real text, not even to the operator, because someone may pass it on by mistake.
        samples={name: [text for text in contents if text.strip()][:5] for name, contents in shown.items()},
        copied_words=quality.COPIED_WORDS,
        min_for_mauve=quality.MIN_FOR_MAUVE,
    )


def _likeness(
    texts: Mapping[str, Sequence[str]], reader: quality.PerplexityModel, real: Real | None
) -> quality.Likeness:
    """Computes no features that MAUVE would not compare."""
    if real is None or len(real.test) < quality.MIN_FOR_MAUVE:
        return quality.Likeness(None, {})
    features = {name: reader.features(own) for name, own in texts.items() if len(own) >= quality.MIN_FOR_MAUVE}
    return quality.Likeness.of(features, reader.features(_texts(real.test)))


def _rows(
    sets: Mapping[str, Sequence[tuple[str, str | None]]],
    reader: quality.PerplexityModel,
    likeness: quality.Likeness,
    real: Real | None,
    adapter: AdapterFiles | None,
    label_field: str | None,
) -> tuple[QualityRow, ...]:
    texts = {name: _texts(pairs) for name, pairs in sets.items()}
    varieties = quality.variety(texts)
    rows = []
    for name, pairs in sets.items():
        own = texts[name]
        rows.append(
            QualityRow(
                name,
                len(own),
                quality.lengths(own),
                varieties[name],
                reader.perplexity(own),
                None if adapter is None else reader.perplexity(own, adapter),
                likeness.scores.get(name),
                quality.utility(_labelled(pairs), _labelled(real.test)) if real and label_field else None,
                # The row of real text compares the texts of different users.
                quality.overlap(own, _texts(real.test if name == REAL else (*real.train, *real.test)))
                if real
                else None,
            )
        )
    return tuple(rows)


def _fields(directory: Path) -> FieldReport | None:
    """Returns the description of the records' fields; None without a schema or a complete record."""
    schema, records = load_job(directory).get("schema"), records_of(load_output(directory))
    return None if schema is None or not records else describe(schema, records)


def _pairs(records: Sequence[Mapping[str, Any]], label_field: str | None) -> tuple[tuple[str, str | None], ...]:
    if label_field is not None and records and label_field not in records[0]:
        raise InputError(f"label-field: the job's texts have no field {label_field!r}")
    return tuple((record["text"], str(record[label_field]) if label_field else None) for record in records)


def _labels(path: Path, label_field: str | None) -> Sequence[str]:
    """Returns the labels of all lines of a JSON Lines file, in order."""
    if label_field is None:
        return []
    if path.is_dir():
        raise InputError(
            f"real {path}: labels are read from JSON Lines; export the dataset, or leave out --label-field"
        )
    labels = []
    for number, row in read_lines(path, "an object with a user, a text and a label", "real"):
        if label_field not in row:
            raise InputError(f"real {path}: line {number}: has no field {label_field!r}")
        labels.append(str(row[label_field]))
    return labels


def _labelled(pairs: Sequence[tuple[str, str | None]]) -> list[tuple[str, str]]:
    return [(text, label) for text, label in pairs if label is not None and text.strip()]


def _texts(pairs: Sequence[tuple[str, str | None]]) -> list[str]:
    return [text for text, _ in pairs]


def _adapter(finetuned: Path | None) -> AdapterFiles | None:
    if finetuned is None:
        return None
    manifest = Manifest.load(finetuned)
    if len(manifest.parts) != 1:
        raise InputError(
            f"finetuned {finetuned}: has {len(manifest.parts)} parts; give an ensemble of one part "
            "(`privmix train --parts 1`)"
        )
    return AdapterFiles(manifest.adapter_path(finetuned, manifest.parts[0]), manifest.part_kind)


def _lengths_figure(texts: Mapping[str, Sequence[str]], theme: Theme) -> Figure:
    palette = PALETTES[theme]
    counts = {name: [len(text.split()) for text in contents] for name, contents in texts.items()}
    longest = max(1.0, float(np.quantile([count for values in counts.values() for count in values], 0.99)))
    figure = Figure(figsize=(7, 3.3), layout="constrained", facecolor=palette.paper)
    axes = figure.subplots()
    bins = np.linspace(0, longest, 25).tolist()
    for colour, (name, values) in zip(palette.lines, counts.items(), strict=False):
        weights = np.full(len(values), 1 / len(values))
        axes.hist(values, bins, weights=weights, histtype="step", linewidth=1.8, color=colour, label=name)
    axes.set_xlabel("words of a text")
    axes.set_ylabel("fraction of texts")
    _style(axes, palette)
    return figure


def _distinct_figure(rows: Sequence[QualityRow], theme: Theme) -> Figure:
    palette = PALETTES[theme]
    figure = Figure(figsize=(7, 3.3), layout="constrained", facecolor=palette.paper)
    axes = figure.subplots()
    width = 0.8 / len(rows)
    for index, (row, colour) in enumerate(zip(rows, palette.lines, strict=False)):
        places = [n + (index - (len(rows) - 1) / 2) * width for n in quality.NGRAMS]
        axes.bar(places, [row.variety.distinct[n] for n in quality.NGRAMS], width, color=colour, label=row.name)
    axes.set_xticks(quality.NGRAMS, [f"distinct-{n}" for n in quality.NGRAMS])
    axes.set_ylabel("fraction of distinct n-grams")
    axes.set_ylim(0, 1)
    _style(axes, palette)
    return figure


def _style(axes: Any, palette: Any) -> None:
    axes.set_facecolor(palette.paper)
    axes.tick_params(colors=palette.muted)
    for side in axes.spines.values():
        side.set_color(palette.rule)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(palette.ink)
    axes.figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=palette.ink)
