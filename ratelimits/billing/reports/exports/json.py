"""Write report rows as one JSON document. The function `schema` returns the JSON Schema of the document.

Quantities are written as strings, because many readers would round large numbers. Counts and versions are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from json.encoder import encode_basestring
from typing import Any

from ratelimits.billing.reports.columns import NUMBERS, ColumnKind
from ratelimits.billing.reports.exports.schema import schema, schema_id
from ratelimits.billing.reports.rows import VERSION, Row, columns
from ratelimits.files import encoded
from ratelimits.usage.periods import iso

__all__ = ["array", "line", "schema", "schema_id", "stream", "text"]

#: Encodes a text for JSON and leaves characters outside ASCII as they are.
text: Callable[[str], str] = encode_basestring


def line(row: Row) -> str:
    """Return a row as compact JSON, with the columns of the row's version in their order."""
    template_and_writers = _TEMPLATES.get(type(row))
    if template_and_writers is None:
        template_and_writers = _TEMPLATES[type(row)] = _template(row.columns_version)
    template, writers = template_and_writers
    # `zip` leaves out the values of columns that were added after the row's version.
    return template % tuple([write(value) for write, value in zip(writers, row, strict=False)])


#: For each type of row, the template of a line, and the functions that write the values of its columns.
_TEMPLATES: dict[type[Row], tuple[str, tuple[Callable[[Any], str], ...]]] = {}


def _template(version: int) -> tuple[str, tuple[Callable[[Any], str], ...]]:
    """Return the template of a line with the columns of a version, and the functions that write their values."""
    version_columns = columns(version)
    template = "{" + ",".join(f'"{column.name}":%s' for column in version_columns) + "}"
    return template, tuple(_writer(column.kind) for column in version_columns)


def _writer(kind: ColumnKind) -> Callable[[Any], str]:
    if kind is ColumnKind.MOMENT:
        return lambda microseconds: f'"{iso(microseconds)}"'
    if kind is ColumnKind.QUANTITY:
        return '"{}"'.format
    return str if kind in NUMBERS else text


def array(items: Iterable[str]) -> Iterator[str]:
    """Yield a JSON array of documents, with each document on a separate line."""
    separator = "[\n"
    for item in items:
        yield separator + item
        separator = ",\n"
    yield "[]" if separator == "[\n" else "\n]"


def stream(rows: Iterable[Row], version: int = VERSION) -> Iterator[bytes]:
    """Yield the rows as a JSON document in chunks. Each row is read shortly before it is written."""
    return encoded(chain([f'{{"schema":{text(schema_id(version))},"lines":'], array(map(line, rows)), ["}\n"]))
