"""Reads rows from JSON Lines, CSV and Parquet in bounded memory.

    for number, row in rows("notes.csv", RowFields(("ID", "dialogue"))):
        row["dialogue"]

The content of a file says what it is. Its name decides only between JSON Lines and CSV, where the first line does not.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from privmix.foundation.errors import CorpusError
from privmix.foundation.json_lines import LINE_LIMIT, BadRow, as_text, lines, parse


@dataclass(frozen=True)
class RowFields:
    """Names the fields that rows are read for. Tables need the first ones, and are not read for others.

    Attributes:
        needed: the fields that a table must have.
        optional: further fields; None for all that there are.
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...] | None = ()


CorpusRow = Mapping[str, Any] | BadRow

_PARQUET = b"PAR1"
_FIELD_LIMIT = 16 * LINE_LIMIT
"""The most characters of a field of CSV. It is read before it is refused, so that the next row is found."""
_HEAD = 2**18
"""The characters by which the kind of a text is told."""
_ROWS_AT_ONCE = 64
"""The rows of Parquet in memory: a small file can hold large texts, each once for many rows that share it."""
_SUFFIXES = (".json", ".jsonl", ".ndjson")


def rows(name: str, fields: RowFields) -> Iterator[tuple[str, CorpusRow]]:
    """Yields each row of a file with its place, such as `line 3`. Blank lines are no rows.

    Args:
        fields: the wanted fields. Rows of JSON Lines and CSV have all others, too.

    Raises:
        CorpusError: the file is of another kind, or damaged: what follows the damage cannot be read.
    """
    try:
        with Path(name).open("rb") as file:
            head = file.read(len(_PARQUET))
            file.seek(0)
            yield from _parquet(name, fields) if head == _PARQUET else _text_rows(as_text(file), name, fields)
    except OSError as error:
        # Arrow's errors can quote values.
        problem = error.strerror or type(error).__name__
        raise CorpusError(f"{name}: is damaged or cannot be read ({problem}); copy it again") from None
    except UnicodeDecodeError:
        raise CorpusError(f"{name}: begins as UTF-16 and is damaged; convert it to UTF-8") from None


def _text_rows(text: TextIO, name: str, fields: RowFields) -> Iterator[tuple[str, CorpusRow]]:
    head = text.read(_HEAD).removeprefix("\ufeff")
    text.seek(0)
    start, first = head.lstrip(), head.partition("\n")[0]
    if re.match(r"\[\s*[{\]]", start):
        raise CorpusError(f"{name}: is one JSON array; write one object on each line, as `jq -c '.[]'` does")
    if "\0" in first:
        raise CorpusError(
            f"{name}: is neither JSON Lines, CSV nor Parquet; it is compressed, of another format, or UTF-16 without a "
            "byte order mark. Decompress or convert it, as `datasets` does"
        )
    if "\r" in first.removesuffix("\r"):
        raise CorpusError(f"{name}: ends its lines with carriage returns alone; convert it, as `tr '\\r' '\\n'` does")
    delimiter = None if start.startswith("{") else _delimiter(first, fields)
    if not start or start.startswith("{") or (delimiter is None and Path(name).suffix in _SUFFIXES):
        yield from _json_rows(text)
    elif delimiter is not None:
        yield from _csv_rows(text, delimiter, fields, name)
    elif any(mark in first for mark in (",", ";", "\t")):
        raise CorpusError(
            f"{name}: its first line names no columns {', '.join(fields.needed)}{_alike(first, fields.needed)}; name "
            "those that hold the user and the text (--user-field, --text-field), or write the names into the first line"
        )
    else:
        raise CorpusError(f"{name}: is text, but neither JSON Lines nor CSV; write one JSON object on each line")


def _json_rows(text: TextIO) -> Iterator[tuple[str, CorpusRow]]:
    for number, line in lines(text):
        try:
            yield f"line {number}", parse(line)
        except BadRow as bad:
            yield f"line {number}", bad


def _delimiter(first: str, fields: RowFields) -> str | None:
    """Returns the delimiter with which the first line names the wanted columns; None if there is none."""
    csv.field_size_limit(_FIELD_LIMIT)
    for delimiter in (",", ";", "\t", "|"):
        if set(fields.needed) <= {*next(csv.reader([first.rstrip("\r")], delimiter=delimiter), [])}:
            return delimiter
    return None


def _alike(first: str, needed: Sequence[str]) -> str:
    """Names the columns that differ in case or spaces. Other cells are not quoted: they can be a row's."""
    cells = re.split(r"[,;\t|]", first.rstrip("\r"))
    alike = [cell for cell in cells if cell.strip().lower() in {field.strip().lower() for field in needed}]
    return f", but {', '.join(map(repr, alike))}" if alike else ""


def _csv_rows(text: TextIO, delimiter: str, fields: RowFields, name: str) -> Iterator[tuple[str, CorpusRow]]:
    """Yields the rows of CSV.

    A quote that is not closed takes the rows of other users. So it is never skipped: whether one user's row is there
    would change the text of others.
    """
    reader = csv.reader(_checked(text, name), delimiter=delimiter, strict=True)
    try:
        header = next(reader)
        if twice := [field for field in _wanted(header, fields, name) if header.count(field) > 1]:
            raise CorpusError(f"{name}: two columns have the name {twice[0]!r}; rename one")
        for row in _numbered(reader):
            _check_quotes(row, header, delimiter, fields.needed[0], name)
            yield _csv_row(row, header)
    except csv.Error:
        raise CorpusError(
            f"{name}, line {reader.line_num}: has a quote that is not closed, or a text of more than "
            f"{_FIELD_LIMIT // 2**20} MiB. The rows after it cannot be told apart, so --skip-bad does not skip it; put "
            "each text in quotes and double the quotes in it"
        ) from None


def _numbered(reader: Any) -> Iterator[tuple[int, int, list[str]]]:
    """Yields the first and the last line of each row that is not blank, and its cells."""
    before = reader.line_num
    for cells in reader:
        if any(cell.strip() for cell in cells):
            yield before + 1, reader.line_num, cells
        before = reader.line_num


def _csv_row(row: tuple[int, int, list[str]], header: list[str]) -> tuple[str, CorpusRow]:
    first, _, cells = row
    if len(cells) == len(header):
        return f"line {first}", dict(zip(header, cells, strict=True))
    return f"line {first}", BadRow("has more or fewer cells than the first line", "put texts with commas in quotes")


def _check_quotes(row: tuple[int, int, list[str]], header: list[str], delimiter: str, user: str, name: str) -> None:
    """Checks that a quote which a text begins with has not taken rows of others, where the writer quotes no texts.

    Raises:
        CorpusError: a row on several lines has too few or too many cells, or one of its lines is a whole row by itself.
    """
    first, last, cells = row
    if last == first:
        return
    taken = "A quote in it may have taken rows of others, so --skip-bad does not skip it; "
    if len(cells) != len(header):
        raise CorpusError(
            f"{name}, line {first}: has {len(cells)} cells on {last - first + 1} lines, not {len(header)}. {taken}"
            "double the quotes in texts"
        )
    column = header.index(user)
    for index, cell in enumerate(cells):
        if lines := cell.splitlines()[1:]:
            lines[-1] = delimiter.join([lines[-1], *cells[index + 1 :]])
        if any(_is_row(line.split(delimiter), cells[column], column, len(header)) for line in lines):
            raise CorpusError(
                f"{name}, line {first}: a line of a quoted text is a whole row by itself. {taken}give the rows as JSON "
                "Lines or Parquet, which need no quotes"
            )


def _is_row(cells: list[str], user: str, column: int, width: int) -> bool:
    """Returns whether cells are a row's and not prose, in which spaces follow commas and part words."""
    if len(cells) != width or not all(cells) or any(cell[0].isspace() for cell in cells[1:]):
        return False
    return len(cells[column].split()) <= len(user.split())


def _checked(text: TextIO, name: str) -> Iterator[str]:
    """Yields the lines of a text. What is not UTF-8 is surrogates there, which `Corpus` refuses."""
    number = 0
    while line := text.readline(_FIELD_LIMIT + 1):
        number += 1
        if len(line) > _FIELD_LIMIT:
            raise CorpusError(f"{name}, line {number}: is longer than {_FIELD_LIMIT // 2**20} MiB; split the text")
        yield line.removeprefix("\ufeff") if number == 1 else line


def _parquet(name: str, fields: RowFields) -> Iterator[tuple[str, CorpusRow]]:
    import pyarrow as pa  # slow to import
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(pa.OSFile(name), buffer_size=2**20)
        columns = _wanted(table.schema_arrow.names, fields, name)
        done = 0
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=columns):
            yield from _table_rows(batch, done)
            done += len(batch)
    except (pa.ArrowException, OSError):
        # Arrow's errors can quote values.
        raise CorpusError(f"{name}: is damaged or incomplete Parquet; copy it again") from None


def _table_rows(batch: Any, before: int) -> Iterator[tuple[str, CorpusRow]]:
    """Yields the rows of a batch of Arrow's, of which `before` rows precede."""
    columns = [_values(column) for column in batch.columns]
    names = batch.schema.names
    for number, values in enumerate(zip(*columns, strict=True), start=before + 1):
        yield f"row {number}", dict(zip(names, values, strict=True))


def _values(column: Any) -> list[Any]:
    """Returns the values of a column. Narrow floats keep their type, which says from where on they are rounded."""
    import pyarrow as pa

    narrow = pa.types.is_float16(column.type) or pa.types.is_float32(column.type)
    return list(column.to_numpy(zero_copy_only=False)) if narrow else column.to_pylist()


def _wanted(names: Sequence[str], fields: RowFields, name: str) -> list[str]:
    """Returns the columns to read.

    Raises:
        CorpusError: a needed field is no column.
    """
    for field in fields.needed:
        if field not in names:
            raise CorpusError(
                f"{name}: has no column {field!r}, only {', '.join(names)}; name the columns that hold the user and "
                "the text (--user-field, --text-field)"
            )
    optional = names if fields.optional is None else fields.optional
    return [field for field in dict.fromkeys((*fields.needed, *optional)) if field in names]
