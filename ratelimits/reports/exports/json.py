"""Report rows as one JSON document, which ratelimits/reports/schema/report.v1.json describes.

Quantities are strings, since a reader that takes numbers for doubles would round them; counts and versions are numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from itertools import chain
from json.encoder import encode_basestring
from typing import Any

from ratelimits.reports.exports.chunks import encoded
from ratelimits.reports.periods import iso
from ratelimits.reports.rows import COLUMNS, MOMENTS, QUANTITIES, Row

#: The `$id` of the schema.
SCHEMA_ID = "urn:ratelimits:schema:report:v1"


#: A text as JSON has it, with the signs that are not ASCII as they are.
text: Callable[[str], str] = encode_basestring


def schema() -> dict[str, Any]:
    """The published JSON Schema (draft 2020-12) of the document; its `$defs.line` is that of one line."""
    text = files("ratelimits.reports").joinpath("schema", "report.v1.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _writer(name: str) -> Callable[[Any], str]:
    """How the values of a column are written."""
    if name in MOMENTS:
        return lambda at: f'"{iso(at)}"'
    if name.endswith("_quantity"):
        return '"{}"'.format
    return str if name in QUANTITIES else text


_WRITE = tuple(map(_writer, COLUMNS))
_LINE = "{" + ",".join(f'"{name}":%s' for name in COLUMNS) + "}"


def line(row: Row) -> str:
    """One line as JSON: compact, the columns in their order."""
    return _LINE % tuple([write(value) for write, value in zip(_WRITE, row, strict=True)])


def array(items: Iterable[str]) -> Iterator[str]:
    """A JSON array of documents, each on a line of its own."""
    separator = "[\n"
    for item in items:
        yield separator + item
        separator = ",\n"
    yield "[]" if separator == "[\n" else "\n]"


def stream(rows: Iterable[Row]) -> Iterator[bytes]:
    """The rows as a JSON document, in chunks; reads only a little ahead of what it has given away."""
    return encoded(chain([f'{{"schema":{text(SCHEMA_ID)},"lines":'], array(map(line, rows)), ["}\n"]))
