"""Report rows as one JSON document, which ratelimits/reports/schema/report.v1.json describes.

Quantities are strings, since a reader that takes numbers for doubles would round them; counts and versions are numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import chain
from typing import Any

from ratelimits.reports.exports.chunks import encoded
from ratelimits.reports.rows import COLUMNS, QUANTITIES, Row

#: The `$id` of the schema.
SCHEMA_ID = "urn:ratelimits:schema:report:v1"

_NUMBERS = sorted(name for name in QUANTITIES if not name.endswith("_quantity"))
#: Compact, and always in the same order.
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def schema() -> dict[str, Any]:
    """The published JSON Schema (draft 2020-12) of the document; its `$defs.line` is that of one line."""
    text = files("ratelimits.reports").joinpath("schema", "report.v1.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def line(row: Row) -> dict[str, str | int]:
    """One line, by column."""
    values: dict[str, str | int] = dict(zip(COLUMNS, row.texts(), strict=True))
    for name in _NUMBERS:
        values[name] = getattr(row, name)
    return values


def array(items: Iterable[str]) -> Iterator[str]:
    """A JSON array of documents, each on a line of its own."""
    separator = "[\n"
    for item in items:
        yield separator + item
        separator = ",\n"
    yield "[]" if separator == "[\n" else "\n]"


def stream(rows: Iterable[Row]) -> Iterator[bytes]:
    """The rows as a JSON document, in chunks; reads only a little ahead of what it has given away."""
    lines = array(encode(line(row)) for row in rows)
    return encoded(chain([f'{{"schema":{encode(SCHEMA_ID)},"lines":'], lines, ["}\n"]))
