"""Describes the fields of generated records: shares of values, dependence of pairs, and lengths of texts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

GeneratedRecord = Mapping[str, Any]


@dataclass(frozen=True)
class EnumeratedField:
    """Describes a field with enumerated values.

    Attributes:
        shares: the fraction of the records with each value, by its text, in the order of the schema.
        distance: the total variation distance from the shares in the real records; None without them.
    """

    name: str
    shares: Mapping[str, float]
    distance: float | None


@dataclass(frozen=True)
class TextField:
    """Describes a field of free text: words (mean, 5th and 95th percentile) and the fraction of distinct values."""

    name: str
    mean: float
    low: float
    high: float
    distinct: float


@dataclass(frozen=True)
class PairOfFields:
    """Describes two enumerated fields together.

    Attributes:
        dependence: the total variation distance of their joint distribution from the product of their marginals.
        distance: that of their joint distribution from the one in the real records; None without them.
    """

    names: tuple[str, str]
    dependence: float
    distance: float | None


@dataclass(frozen=True)
class FieldReport:
    """Holds the descriptions of all fields. Distances depend on the real records, without protection."""

    records: int
    enumerated: tuple[EnumeratedField, ...]
    texts: tuple[TextField, ...]
    pairs: tuple[PairOfFields, ...]


def describe(
    schema: Mapping[str, Any], records: Sequence[GeneratedRecord], real: Sequence[GeneratedRecord] | None = None
) -> FieldReport:
    """Describes the fields of records.

    Args:
        schema: the JSON Schema of the records, an object with properties.
        records: at least one.
        real: records with the same fields, to compare with.
    """
    properties: Mapping[str, Any] = schema["properties"]
    values = {name: kept for name, property_ in properties.items() if (kept := _values(property_)) is not None}
    enumerated = tuple(
        EnumeratedField(
            name,
            {value: shares.get((value,), 0.0) for value in kept},
            None if real is None else variation(shares, _shares(real, name)),
        )
        for name, kept in values.items()
        for shares in [_shares(records, name)]
    )
    pairs = tuple(_pair(names, records, real) for names in combinations(values, 2))
    texts = [name for name, property_ in properties.items() if name not in values and _is_text(property_)]
    return FieldReport(len(records), enumerated, tuple(_text(name, records) for name in texts), pairs)


def variation(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Returns the total variation distance of two distributions, in [0, 1]."""
    return sum(abs(one.get(value, 0.0) - other.get(value, 0.0)) for value in {*one, *other}) / 2


def _pair(
    names: tuple[str, str], records: Sequence[GeneratedRecord], real: Sequence[GeneratedRecord] | None
) -> PairOfFields:
    joint = _shares(records, *names)
    first, second = (_shares(records, name) for name in names)
    product = {(*a, *b): first[a] * second[b] for a in first for b in second}
    return PairOfFields(
        names, variation(joint, product), None if real is None else variation(joint, _shares(real, *names))
    )


def _text(name: str, records: Sequence[GeneratedRecord]) -> TextField:
    values = [str(record.get(name, "")) for record in records]
    words = np.array([len(value.split()) for value in values])
    low, high = np.quantile(words, [0.05, 0.95])
    return TextField(name, float(words.mean()), float(low), float(high), len(set(values)) / len(values))


def _shares(records: Iterable[GeneratedRecord], *names: str) -> dict[tuple[str, ...], float]:
    """Returns the fraction of the records with each combination of values."""
    counts = Counter(tuple(str(record.get(name)) for name in names) for record in records)
    total = counts.total()
    return {values: count / total for values, count in counts.items()}


def _values(property_: Any) -> list[str] | None:
    """Returns the texts of the values of an enumerated field; None for another field."""
    if not isinstance(property_, Mapping):
        return None
    if isinstance(property_.get("enum"), list):
        return [str(value) for value in property_["enum"]]
    return [str(True), str(False)] if property_.get("type") == "boolean" else None


def _is_text(property_: Any) -> bool:
    return isinstance(property_, Mapping) and property_.get("type") == "string"
